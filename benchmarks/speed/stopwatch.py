"""Time measurement of a program's parts without changes to its code."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Stopwatch:
    """Sum of seconds by name; nested work counts only under its own name.

    Parameters
    ----------
    device : device of the work; a CUDA device is synchronized whenever the clock is read
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._running = ["other"]
        self._device = device
        self._since = self.now()

    def now(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Count the time in the ``with`` block under ``name``."""
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def stop(self) -> dict[str, float]:
        """Return the seconds by name, sorted."""
        self._count()
        return dict(sorted(self.seconds.items()))

    def timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``work`` as a function whose time is counted under ``name``."""

        def counted(*arguments: Any, **named: Any) -> Any:
            with self.counting(name):
                return work(*arguments, **named)

        return counted

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Replace a function of ``owner`` by a counted one."""
        setattr(owner, function, self.timed(getattr(owner, function), name))

    def watch_entering(self, owner: Any, function: str, name: str) -> None:
        """Replace a context manager of ``owner`` by one whose entry is counted.

        Work in the ``with`` block counts under its own names.
        """
        entered = getattr(owner, function)

        @contextmanager
        def counted(*arguments: Any, **named: Any) -> Iterator[Any]:
            with ExitStack() as stack:
                with self.counting(name):
                    inside = stack.enter_context(entered(*arguments, **named))
                yield inside

        setattr(owner, function, counted)

    def _count(self) -> None:
        now = self.now()
        running = self._running[-1]
        self.seconds[running] = self.seconds.get(running, 0.0) + now - self._since
        self._since = now
