"""What a person sees while a run works: one line per event with a bar, and the same events in ``metrics.jsonl``.

Texts may quote what a client wrote. Each is shown, and stored, as one line of printable characters.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from espalier.amounts import duration
from espalier.pace.beats import Pace
from espalier.storage.atomic import finite_values
from espalier.wire.printable import printable
from strategies.engine.clock import Clock
from strategies.engine.run_folder import RunFolder

WIDTH = 24
MOST_CHARACTERS = 10_000
"""Of a line; reasons are shorter, a line with all clients' names may be long."""
SECONDS_OF_SILENCE = 60.0
"""While the server waits for others and hears nothing of them."""


class Progress:
    """Reports steps of a piece of work whose size is known."""

    def __init__(
        self, folder: RunFolder, clock: Clock, show: Callable[[str], None] = print
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._show = show
        self._beats = Pace(self._beaten, clock.now)
        self._waits = Pace(self._waited, clock.now, SECONDS_OF_SILENCE)
        self._title = ""
        self._total = 0
        self._done = 0
        self._started = 0.0

    def begin(self, title: str, total: int) -> None:
        """Start a piece of work of ``total`` steps."""
        self._title, self._total, self._done, self._started = title, total, 0, self._clock.now()
        self._beats = Pace(self._beaten, self._clock.now)
        self._waits = Pace(self._waited, self._clock.now, SECONDS_OF_SILENCE)
        self.event("begin", title=title, total=total)

    def step(self, event: str, text: str, **details: Any) -> None:
        """One step is done; shows the bar, what was done, and the time left at this pace."""
        self._done += 1
        elapsed = self._clock.now() - self._started
        left = elapsed / self._done * max(0, self._total - self._done)
        filled = WIDTH * min(self._done, self._total) // max(1, self._total)
        bar = "█" * filled + "░" * (WIDTH - filled)
        self._line(
            f"{self._title:<12} {bar} {self._done}/{self._total}  {text}  [{duration(elapsed)},"
            f" {duration(left)} left]"
        )
        self.event(event, done=self._done, total=self._total, text=text, **details)

    def note(self, event: str, text: str, **details: Any) -> None:
        """Something happened that is no step."""
        self._line(text)
        self.event(event, text=text, **details)

    def beat(self, text: str) -> None:
        """Hear how far this process's own work is; every few seconds a line of it is shown, where there is no other."""
        self._beats(text)

    def waiting(self, whom: str) -> None:
        """Nothing happens but that others are waited for; said once a minute."""
        self._waits(whom)

    def _beaten(self, line: str) -> None:
        self.note("beat", f"{self._title:<12} {line}")

    def _waited(self, line: str) -> None:
        self.note("waiting", f"{self._title:<12} waiting for {line}")

    def _line(self, text: str) -> None:
        self._show(printable(text, MOST_CHARACTERS))
        self._beats.another_line()
        self._waits.another_line()

    def event(self, event: str, **details: Any) -> None:
        """Append an event to ``metrics.jsonl``; a number that is NaN or infinite is null there."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {
            name: printable(value, MOST_CHARACTERS) if isinstance(value, str) else value
            for name, value in details.items()
        }
        self._folder.metrics.append({"time": now, "event": event, **finite_values(told)})
