"""Commands that end with this process, even if it is killed (see ``keeper``)."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from espalier.launch import process_keeper
from espalier.launch.process_keeper import STOP, TOKEN, carrying, end_all

GRACE_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL for commands that have nothing to finish."""
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
    """Run a command under a keeper, which ends it with the block or with this process.

    Descendants of the command are ended too, with SIGTERM and, ``grace`` seconds later, SIGKILL.
    The keeper removes ``folder`` if this process is killed. ``streams`` are ``stdout``, ``bufsize``
    and others, as for ``subprocess.Popen``.

    Yields
    ------
    Process of the keeper. It ends with the command and returns its exit code, or 128 plus the
    number of a signal.
    """
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-P", os.path.abspath(process_keeper.__file__), str(folder), str(grace),
         *command],
        env={**environment, TOKEN: token}, cwd=cwd, stdin=subprocess.PIPE, start_new_session=True,
        **streams,
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
    # This finds processes only if the keeper was killed.
    end_all(lambda: carrying(token), grace)
    if process.stdout is not None:
        process.stdout.close()


def _interrupt_handlers() -> dict[int, Any]:
    """Return the handlers of interrupts by signal; none outside the main thread."""
    # Python allows signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in INTERRUPTS}


@contextmanager
def _interrupts_handled(handler: Any, before: Mapping[int, Any]) -> Iterator[None]:
    """Replace the handlers of interrupts in this block; ignored signals stay ignored."""
    for number, earlier in before.items():
        if earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interrupted_later() -> Iterator[list[int]]:
    """Record the first interrupt in this block instead of acting on it.

    Yields the list of recorded signals. A second interrupt has its usual effect.
    """
    noted: list[int] = []
    before = _interrupt_handlers()

    def note(number: int, _: object) -> None:
        noted.append(number)
        for other, handler in before.items():
            signal.signal(other, handler)

    with _interrupts_handled(note, before):
        yield noted


def uninterrupted() -> AbstractContextManager[None]:
    """Ignore interrupts in a block, which is short and already part of an end."""
    return _interrupts_handled(signal.SIG_IGN, _interrupt_handlers())


def take_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP."""
    for number in INTERRUPTS:
        # ``nohup`` makes a process ignore SIGHUP, which must stay so.
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
