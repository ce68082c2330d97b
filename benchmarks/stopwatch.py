"""Where does the time of a program go that is not to be changed for the measurement?"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up seconds by name; what runs within something else is counted once, under its own name.

    Parameters
    ----------
    device : if it is a CUDA device, it has finished its work whenever the clock is read
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._running = ["other"]
        self._device = device
        self._since = self.now()

    def now(self) -> float:
        """Seconds since some moment, when the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Count what is done within under a name."""
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def stop(self) -> dict[str, float]:
        """Seconds by name."""
        self._count()
        return dict(sorted(self.seconds.items()))

    def timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function that is counted."""

        def counted(*arguments: Any, **named: Any) -> Any:
            with self.counting(name):
                return work(*arguments, **named)

        return counted

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Count an owner's function from now on."""
        setattr(owner, function, self.timed(getattr(owner, function), name))

    def watch_entering(self, owner: Any, function: str, name: str) -> None:
        """Count the way into an owner's context manager from now on, and what is done in it under the names of that."""
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
