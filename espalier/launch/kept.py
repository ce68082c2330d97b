"""Commands that do not outlive this process, whatever ends it: see ``keeper``."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.launch import keeper
from espalier.launch.keeper import STOP, TOKEN, carrying, end_all

GRACE_SECONDS = 3.0
"""Of what has nothing to say at its end."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kept(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    cwd: Path,
    grace: float = GRACE_SECONDS,
    **streams: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a command under a keeper; at the end of the block, or of this process, it and all that came of it are ended.

    Parameters
    ----------
    command : program and arguments
    folder : removed by the keeper if this process is killed
    environment, cwd : of the command
    grace : seconds between SIGTERM and SIGKILL
    streams : ``stdout``, ``stderr`` and their ``text``, ``bufsize``, as ``subprocess.Popen`` takes them

    Yields
    ------
    The keeper's process; it ends when the command does, with its exit code, or with 128 and the signal's number.
    """
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-P", os.path.abspath(keeper.__file__), str(folder), str(grace), *command],
        env={**environment, TOKEN: token}, cwd=cwd, stdin=subprocess.PIPE, start_new_session=True, **streams,
    )  # fmt: skip
    try:
        yield process
    finally:
        with uninterrupted():
            _stop(process, token, grace)


def _stop(process: subprocess.Popen[Any], token: str, grace: float) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        os.write(process.stdin.fileno(), STOP)
    with suppress(OSError):
        process.stdin.close()
    process.wait()
    end_all(lambda: carrying(token), grace)  # nothing, unless the keeper was killed
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def interrupted_later() -> Iterator[list[int]]:
    """The first interrupt has no effect in this block but to be noted in what this yields; the second one counts as ever."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in INTERRUPTS}

    def note(number: int, _: object) -> None:
        noted.append(number)
        for other, handler in before.items():
            signal.signal(other, handler)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt has no effect in this block, which is an end already, and short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
