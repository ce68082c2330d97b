"""Beats: one for each block or step of a long piece of work, said by whoever does it.

The rooms that compute say ``beat("block 3 of 12")`` and need not know who hears it: a client's log, the lines of a run, nobody.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from espalier.amounts import duration

T = TypeVar("T")

Listener = Callable[[str], None]
"""Hears every beat, however many there are."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Let a listener hear all beats of this thread until the end of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def beats_of(whom: str) -> Iterator[None]:
    """Whoever listens hears of all beats until the end of the block whose they are: ``client 3: block 2 of 12``."""
    listener = _listener.get()
    if listener is None:
        yield
        return
    with heard_by(lambda text: listener(f"{whom}: {text}")):
        yield


def beat(text: str) -> None:
    """Say what is being done now; where nobody listens this costs nothing."""
    if (listener := _listener.get()) is not None:
        listener(text)


def beats(parts: Collection[T], what: str) -> Iterator[T]:
    """Go through the parts of a piece of work, and say of each that it begins: ``block 3 of 12``."""
    for number, part in enumerate(parts, start=1):
        beat(f"{what} {number} of {len(parts)}")
        yield part


class Share:
    """Beats of a long piece of work of a known size: the share that is done, and the time left at this pace.

    Parameters
    ----------
    what : is done
    total : its size, in whatever unit
    now : seconds that only grow
    """

    def __init__(self, what: str, total: float, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._now = now
        self._began = now()

    def __call__(self, done: float) -> None:
        """Say that so much is done."""
        if _listener.get() is None or done <= 0:
            return
        total = max(done, self._total)
        left = (self._now() - self._began) * (total - done) / done
        beat(f"{self._what}: {done / total:.0%}, {duration(left)} left")


def in_shares(parts: Collection[T], what: str) -> Iterator[T]:
    """Go through the many parts of a piece of work, and say what share of them is done."""
    share = Share(what, len(parts))
    for number, part in enumerate(parts):
        share(number)
        yield part


class Pace:
    """A listener that makes a line of a beat every few seconds, with the seconds since it began.

    Parameters
    ----------
    say : gets each line
    now : seconds that only grow
    every : seconds between two lines at least, and before the first
    """

    def __init__(
        self,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        every: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        self._say = say
        self._now = now
        self._every = every
        self._began = self._last = now()

    def __call__(self, text: str) -> None:
        """Hear a beat."""
        now = self._now()
        if now - self._last >= self._every:
            self._last = now
            self._say(f"{text}  [{duration(now - self._began)}]")

    def another_line(self) -> None:
        """Something else was said just now, so that the next line can wait."""
        self._last = self._now()
