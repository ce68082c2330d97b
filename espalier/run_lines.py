"""Lines of a run's log about its progress: the server writes them, a live view reads them again.

Every line begins with a label of at least ``LABEL`` characters: a phase of the run, such as
``training``, a site, or the kind of event. Two forms can be read without understanding the text:

    training     ████████░░░░░░░░░░░░░░░░ 1/3  site-a: adapters, 27 s of work  [30 s, 60 s left]
    site-a       train: training step 2 of 20  [11 s]

The first line of a phase has 0 finished steps; it tells whether the steps are answers of clients,
and the round:

    training     ░░░░░░░░░░░░░░░░░░░░░░░░ 0/3 clients, round 2 of 5
"""

import re
from dataclasses import dataclass
from typing import Self

from espalier.amounts import duration

LABEL = 12
"""Minimum number of characters of a label; shorter ones are padded."""
BAR = 24
FULL = "█"
EMPTY = "░"
SECONDS = r"\d+ (?:s|min|h|d)(?: \d+ (?:s|min|h))?"
"""Pattern of a duration as ``espalier.amounts.duration`` writes it."""
STEP = re.compile(
    rf"(?P<phase>\S.{{{LABEL - 1},}}?) [{FULL}{EMPTY}]{{{BAR}}} (?P<done>\d+)/(?P<total>\d+)"
    r"(?P<clients> clients)?(?:, round (?P<number>\d+) of (?P<of>\d+))?"
    rf"(?:  (?P<text>.*)  \[{SECONDS}, {SECONDS} left\])?"
)
EVENTS = ("refused", "dropped", "reconnected", "lost state", "measured", "warning:")
"""Labels of lines about events, which may end like a progress line: their text may be a site's."""
PROGRESS = re.compile(rf"(?P<who>\S.{{{LABEL - 1},}}?) (?P<text>\S.*)  \[{SECONDS}\]")
NOTE = re.compile(rf"(?P<label>\S.{{{LABEL - 1}}}) (?P<text>\S.*)")


def bar(done: int, total: int, width: int = BAR) -> str:
    """Return a bar of ``width`` characters for ``done`` of ``total`` steps."""
    filled = width * min(done, total) // max(1, total)
    return FULL * filled + EMPTY * (width - filled)


@dataclass(frozen=True)
class PhaseLine:
    """First line of a phase of ``total`` steps, at least 1."""

    phase: str
    total: int
    of_clients: bool = False
    """True if each step is the answer of a client."""
    server_round: tuple[int, int] | None = None
    """Number of the round and of all rounds; None for a phase that begins no round."""

    def __str__(self) -> str:
        """Return the line."""
        unit = " clients" if self.of_clients else ""
        rounds = ", round {} of {}".format(*self.server_round) if self.server_round else ""
        return f"{self.phase:<{LABEL}} {bar(0, self.total)} 0/{self.total}{unit}{rounds}"

    @classmethod
    def read(cls, line: str) -> Self | None:
        """Return the content of a line, or None if it has another form."""
        found = STEP.fullmatch(line)
        if found is None or found["text"] is not None:
            return None
        rounds = (int(found["number"]), int(found["of"])) if found["number"] else None
        return cls(found["phase"].strip(), int(found["total"]), bool(found["clients"]), rounds)


@dataclass(frozen=True)
class StepLine:
    """Line about a finished step of a phase."""

    phase: str
    done: int
    total: int
    text: str
    """What was done. It may begin with the name of a site or a model and a colon."""

    def line(self, elapsed: float, left: float) -> str:
        """Return the line, with the seconds since the phase began and those expected to its end."""
        return (
            f"{self.phase:<{LABEL}} {bar(self.done, self.total)} {self.done}/{self.total}"
            f"  {self.text}  [{duration(elapsed)}, {duration(left)} left]"
        )

    @classmethod
    def read(cls, line: str) -> Self | None:
        """Return the content of a line, or None if it has another form."""
        found = STEP.fullmatch(line)
        if found is None or found["text"] is None:
            return None
        return cls(found["phase"].strip(), int(found["done"]), int(found["total"]), found["text"])


@dataclass(frozen=True)
class LabelledLine:
    """Line with a label and a text."""

    label: str
    """Phase, site or kind of event."""
    text: str

    def __str__(self) -> str:
        """Return the line."""
        return f"{self.label:<{LABEL}} {self.text}"

    @classmethod
    def read_progress(cls, line: str) -> Self | None:
        """Return the content of a progress line, which ends with a time; None for other lines."""
        found = PROGRESS.fullmatch(line)
        if found is None or line.startswith(EVENTS):
            return None
        return cls(found["who"].strip(), found["text"])

    @classmethod
    def read(cls, line: str) -> Self | None:
        """Return the content of a line whose label has at most ``LABEL`` characters, or None."""
        found = NOTE.fullmatch(line)
        return cls(found["label"].strip(), found["text"]) if found else None
