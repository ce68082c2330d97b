"""Keeper process: starts a command, and ends it and its descendants when the parent is gone.

    python process_keeper.py FOLDER SECONDS COMMAND ...

Its standard input is a pipe whose other end only the parent holds, so the kernel reports the
parent's end, for every cause. The keeper also ends everything when the command itself ends. It
finds descendants of the command in two ways. On Linux this process adopts descendants whose parents
died, so they remain its descendants in any session (Ray's processes have their own). On all
systems, descendants inherit a token in their environment.

Covers: an end of the parent by exit, error, Ctrl-C, SIGTERM or SIGKILL, and processes in other
sessions.
Does not cover: SIGKILL of the keeper itself, and, on systems other than Linux, orphans that have
cleared their environment.

It imports nothing of Espalier, so that it starts at once and needs no import path.
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
"""Byte with which the parent asks for the end.

If the pipe closes without it, the parent is gone, and the keeper removes the folder too.
"""
GIVE_UP_SECONDS = 60.0
POLL_SECONDS = 0.1
ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of Linux."""


def main(folder: str, grace: float, command: list[str]) -> int:
    """Run a command and end its descendants with it.

    ``folder`` is removed if the parent is gone; ``grace`` is in seconds, between SIGTERM and
    SIGKILL.

    Returns
    -------
    Exit code of the command, 128 plus the number of the signal that ended it, or 0 if the parent
    asked for the end or is gone.
    """
    ends: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ends.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A handler, because a command would inherit ignored signals.
        signal.signal(number, end)
    _adopt_orphans()
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = None
    received = None
    while code is None and received is None and not ends:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            received = os.read(0, 1)
        code = _reap(started.pid)
    end_all(lambda: _own(os.environ.get(TOKEN, "")), grace)
    if received == b"" and folder:
        shutil.rmtree(folder, ignore_errors=True)
    if code is None:
        return 0
    return code if code >= 0 else 128 - code


def carrying(token: str) -> list[psutil.Process]:
    """Return the processes that inherited a token, without this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and token and process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def end_all(find: Callable[[], list[psutil.Process]], grace: float) -> None:
    """End all processes that ``find`` returns, until it returns none.

    They get SIGTERM first and SIGKILL after ``grace`` seconds. ``find`` is called repeatedly,
    because processes may start others meanwhile.
    """
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
    """Reap children that have ended; return the exit code of ``wanted`` if it is among them."""
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
