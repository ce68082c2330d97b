"""Progress reports: one text for each block or step of a long piece of work.

Code that computes calls ``report_progress("block 3 of 12")`` and does not know the listener: a
client's log, the progress lines of a run, or none.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from espalier.amounts import duration

T = TypeVar("T")

Listener = Callable[[str], None]
"""Function that receives every progress text."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """Let a listener receive all progress of this thread until the end of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def progress_prefix(whom: str) -> Iterator[None]:
    """Prefix all progress in the block with a name, such as ``client 3: block 2 of 12``."""
    listener = _listener.get()
    if listener is None:
        yield
        return
    with progress_listener(lambda text: listener(f"{whom}: {text}")):
        yield


def report_progress(text: str) -> None:
    """Report what is being done now; without a listener this does nothing."""
    if (listener := _listener.get()) is not None:
        listener(text)


def report_each(parts: Collection[T], what: str) -> Iterator[T]:
    """Iterate over the parts of a piece of work and report the start of each: ``block 3 of 12``."""
    for number, part in enumerate(parts, start=1):
        report_progress(f"{what} {number} of {len(parts)}")
        yield part


class PercentDone:
    """Progress of work of known size ``total``: percentage, and time left at this throttle."""

    def __init__(self, what: str, total: float, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._now = now
        self._began = now()

    def __call__(self, done: float) -> None:
        """Report the amount ``done`` so far, in the unit of the total."""
        if _listener.get() is None or done <= 0:
            return
        total = max(done, self._total)
        left = (self._now() - self._began) * (total - done) / done
        report_progress(f"{self._what}: {done / total:.0%}, {duration(left)} left")


def with_progress(parts: Collection[T], what: str) -> Iterator[T]:
    """Iterate over many parts of a piece of work and report the percentage done."""
    percent = PercentDone(what, len(parts))
    for number, part in enumerate(parts):
        percent(number)
        yield part


class Throttle:
    """Listener that says a progress line every few seconds, with the time since its start.

    ``every`` is the minimum number of seconds between two lines, and before the first.
    """

    def __init__(
        self, say: Listener, now: Callable[[], float] = time.monotonic, every: float = 10.0
    ) -> None:
        self._say = say
        self._now = now
        self._every = every
        self._began = self._last = now()

    def __call__(self, text: str) -> None:
        """Receive a progress text."""
        now = self._now()
        if now - self._last >= self._every:
            self._last = now
            self._say(f"{text}  [{duration(now - self._began)}]")

    def another_line(self) -> None:
        """Record that another line was just printed, so that the next progress line waits."""
        self._last = self._now()
