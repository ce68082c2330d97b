"""A process that keeps another: it starts a command, and ends it and all that came of it when its own parent is gone.

    python keeper.py FOLDER SECONDS COMMAND ...

Its standard input is a pipe whose other end the parent alone holds, so that the kernel tells it of the parent's end, however
that came about. It also ends everything when the command itself ends. What came of the command is found in two ways: on Linux
this process adopts all its descendants whose own parents died, so that they stay its descendants in whatever session they are
(Ray's have one of their own); elsewhere, and beside it, by a token that all of them inherit in their environment.

Covers: the parent's end by an exit, an error, Ctrl-C, SIGTERM or SIGKILL, and processes in other sessions.
Does not cover: SIGKILL of this process itself; and where it is not Linux, orphans that have cleared their environment.

It imports nothing of Espalier, so that it starts at once and needs no path.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import psutil

TOKEN = "ESPALIER_KEPT"
STOP = b"."
"""What the parent writes when it wants an end itself; without it the parent is gone, and the folder is removed too."""
GIVE_UP_SECONDS = 60.0
POLL_SECONDS = 0.1
ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of Linux."""


def main(folder: str, grace: float, command: list[str]) -> int:
    """Keep a command, which has so many seconds between SIGTERM and SIGKILL.

    Returns its exit code, of a signal 128 and its number, and 0 if the end came from the parent.
    """
    ends: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ends.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)  # what was ignored here would be ignored by the command too
    _adopt_orphans()
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = None
    told = None
    while code is None and told is None and not ends:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            told = os.read(0, 1)
        code = _reap(started.pid)
    end_all(lambda: _own(os.environ.get(TOKEN, "")), grace)
    if told == b"" and folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if code is None else code if code >= 0 else 128 - code


def carrying(token: str) -> list[psutil.Process]:
    """Processes that inherited a token, but for this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and token and process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def end_all(find: Callable[[], list[psutil.Process]], grace: float) -> None:
    """End all processes that are found, again and again until none is: first asked, then, after so many seconds, killed."""
    asked: set[psutil.Process] = set()
    kill = time.monotonic() + grace
    while (now := time.monotonic()) < kill + GIVE_UP_SECONDS and (
        alive := [one for one in find() if _lives(one)]
    ):
        for one in alive:
            with suppress(psutil.Error):
                if now >= kill:
                    one.kill()
                elif one not in asked:
                    one.terminate()
        asked.update(alive)
        time.sleep(POLL_SECONDS)


def _own(token: str) -> list[psutil.Process]:
    _reap(None)
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    return [*children, *(one for one in carrying(token) if one not in children)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _reap(wanted: int | None) -> int | None:
    """Let go of children that have ended; returns the exit code of the wanted one if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
