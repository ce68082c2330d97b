"""What a person sees while a run works: one line per event with a bar, and the same events in ``metrics.jsonl``."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from strategies.clock import Clock
from strategies.run_folder import RunFolder

WIDTH = 24


class Progress:
    """Reports steps of a piece of work whose size is known."""

    def __init__(self, folder: RunFolder, clock: Clock, show: Callable[[str], None] = print) -> None:
        self._folder = folder
        self._clock = clock
        self._show = show
        self._title, self._total, self._done, self._started = "", 0, 0, 0.0

    def begin(self, title: str, total: int) -> None:
        """Start a piece of work of ``total`` steps."""
        self._title, self._total, self._done, self._started = title, total, 0, self._clock.now()
        self.event("begin", title=title, total=total)

    def step(self, event: str, text: str, **details: Any) -> None:
        """One step is done; shows the bar, what was done, and the time left at this pace."""
        self._done += 1
        elapsed = self._clock.now() - self._started
        left = elapsed / self._done * max(0, self._total - self._done)
        filled = WIDTH * min(self._done, self._total) // max(1, self._total)
        bar = "█" * filled + "░" * (WIDTH - filled)
        self._show(f"{self._title:<12} {bar} {self._done}/{self._total}  {text}  [{elapsed:.0f} s, {left:.0f} s left]")
        self.event(event, done=self._done, total=self._total, text=text, **details)

    def note(self, event: str, text: str, **details: Any) -> None:
        """Something happened that is no step."""
        self._show(text)
        self.event(event, text=text, **details)

    def event(self, event: str, **details: Any) -> None:
        """Append an event to ``metrics.jsonl``."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._folder.metrics.append({"time": now, "event": event, **details})
