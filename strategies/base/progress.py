"""Progress of a run: one line per event with a bar, and the same events in ``metrics.jsonl``.

Texts may quote strings from clients. Each text is shown and stored as one line of printable
characters.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from espalier.identity.names import printable
from espalier.progress import Throttle
from espalier.run_lines import LabelledLine, PhaseLine, StepLine
from espalier.storage.atomic import finite_values
from strategies.base.run_folder import RunFolder


@dataclass(frozen=True)
class Clock:
    """Source of monotonic time, in seconds, and a function that waits."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


MAX_CHARACTERS = 10_000
"""Maximum length of a line. Most are shorter; one with the names of all clients may be long."""
SECONDS_OF_SILENCE = 60.0
"""Seconds between two progress lines while the server waits for clients and receives nothing."""


class Progress:
    """Progress of a piece of work with a known number of steps."""

    def __init__(
        self, folder: RunFolder, clock: Clock, show: Callable[[str], None] = print
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._show = show
        self._throttle = Throttle(self._note_progress, clock.now)
        self._waits = Throttle(self._waited, clock.now, SECONDS_OF_SILENCE)
        self._title = ""
        self._total = 0
        self._done = 0
        self._started = 0.0
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        """Functions that are called with the name and the details of each event."""

    def begin(
        self,
        title: str,
        total: int,
        *,
        of_clients: bool = False,
        server_round: tuple[int, int] | None = None,
    ) -> None:
        """Start a piece of work of ``total`` steps; without steps no line is shown.

        Parameters
        ----------
        of_clients : whether each step is the answer of a client
        server_round : number of the round that begins, and of all rounds
        """
        self._title = title
        self._total = total
        self._done = 0
        self._started = self._clock.now()
        self._throttle = Throttle(self._note_progress, self._clock.now)
        self._waits = Throttle(self._waited, self._clock.now, SECONDS_OF_SILENCE)
        if total:
            self._line(str(PhaseLine(title, total, of_clients, server_round)))
        self.event("begin", title=title, total=total)

    def step(self, event: str, text: str, **details: Any) -> None:
        """Finish one step: show the bar, ``text``, the elapsed and the expected remaining time."""
        self._done += 1
        elapsed = self._clock.now() - self._started
        left = elapsed / self._done * max(0, self._total - self._done)
        line = StepLine(self._title, self._done, self._total, text)
        self._line(line.line(elapsed, left))
        self.event(event, done=self._done, total=self._total, text=text, **details)

    def note(self, event: str, text: str, **details: Any) -> None:
        """Show and record an event that is not a step."""
        self._line(text)
        self.event(event, text=text, **details)

    def report(self, text: str) -> None:
        """Report progress of this process's own work.

        A line is shown every few seconds, unless another line was shown in the meantime.
        """
        self._throttle(text)

    def waiting(self, whom: str) -> None:
        """Report that the server only waits for clients; a line is shown once a minute."""
        self._waits(whom)

    def _note_progress(self, line: str) -> None:
        self.note("progress", str(LabelledLine(self._title, line)))

    def _waited(self, line: str) -> None:
        self.note("waiting", str(LabelledLine(self._title, f"waiting for {line}")))

    def _line(self, text: str) -> None:
        self._show(printable(text, MAX_CHARACTERS))
        # Any line, not only a progress text, shows that the run is alive.
        self._throttle.another_line()
        self._waits.another_line()

    def event(self, event: str, **details: Any) -> None:
        """Append an event to ``metrics.jsonl``; NaN and infinite numbers are stored as null."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        # Strings of clients must not break a line or carry control characters.
        fields = {
            name: printable(value, MAX_CHARACTERS) if isinstance(value, str) else value
            for name, value in details.items()
        }
        # JSON has no NaN; other readers of the file would fail.
        self._folder.metrics.append({"time": now, "event": event, **finite_values(fields)})
        for listener in self.listeners:
            listener(event, details)
