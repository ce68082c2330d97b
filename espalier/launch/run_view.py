"""Live view of a run: its phase, rounds, clients and quality so far, from the lines of its log.

Lines about single steps only change the view. All others are for the caller to print above it, so
that messages, errors and results stay on the screen.
"""

import re
import time
from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.text import Text

from espalier.amounts import count, duration
from espalier.run_lines import EMPTY, FULL, LABEL, LabelledLine, PhaseLine, StepLine, bar

MAX_CLIENTS = 8
"""Maximum number of clients that the view shows; clients at work come first."""
ROUNDS_SHOWN = 3
"""Maximum number of rounds whose quality the view shows."""
MIN_BAR = 4
MAX_BAR = 24
ENROLLING = "enrolling"
MEASURING = ("evaluating", "testing")
"""Phases whose steps are the quality of one model each."""
COUNTED = re.compile(r"(.*?)(\d+) of (\d+)")
ASCII = str.maketrans(FULL + EMPTY + "·", "#.-")


class RunView:
    """View of one run, which can be printed by rich at any time.

    ``now`` returns seconds.
    """

    def __init__(self, method: str, now: Callable[[], float] = time.monotonic) -> None:
        self._method = method
        self._now = now
        self._began = now()
        self._phase = PhaseLine("starting", 0)
        self._phase_began = now()
        self._done = 0
        self._status = ""
        """Last progress line of the server in this phase."""
        self._counted: tuple[str, int, float] | None = None
        """Words, first number and its time of the counting progress lines in this phase."""
        self._round: tuple[int, int] | None = None
        self._rounds_began = now()
        self._first_round = 0
        self._finished_round = 0
        self._clients: set[str] = set()
        self._working: dict[str, str] = {}
        """Progress of the clients at work, by site."""
        self._answered: dict[str, str] = {}
        """Clients that have answered in this phase, the last one at the end."""
        self._quality: dict[str, str] = {}
        """Quality after the last rounds, the newest first."""
        self._final: dict[str, str] = {}
        """Quality at the end of the run, by model."""

    # ----- lines of the log -----------------------------------------------------------------------

    def take(self, line: str) -> bool:
        """Process a line of the log; return True if the view shows it, so it is not printed."""
        if phase := PhaseLine.read(line):
            self._begin(phase)
        elif step := StepLine.read(line):
            self._step(step)
        elif progress := LabelledLine.read_progress(line):
            self._show_progress(progress)
        elif note := LabelledLine.read(line):
            return self._note(note)
        else:
            return False
        return True

    def _begin(self, phase: PhaseLine) -> None:
        self._phase = phase
        self._phase_began = self._now()
        self._done = 0
        self._status = ""
        self._counted = None
        self._working.clear()
        self._answered.clear()
        if phase.server_round is not None:
            if self._round is None:
                self._rounds_began = self._now()
                self._first_round = phase.server_round[0]
            self._round = phase.server_round

    def _step(self, step: StepLine) -> None:
        if step.phase != self._phase.phase:
            self._begin(PhaseLine(step.phase, step.total))
        self._done = step.done
        self._status = ""
        who, colon, what = step.text.partition(": ")
        if not (colon and self._phase.of_clients):
            self._status = step.text
        elif step.phase == ENROLLING:
            self._clients.add(who)
        else:
            self._clients.add(who)
            self._working.pop(who, None)
            self._answered[who] = what
        if step.phase in MEASURING and colon:
            self._final[who] = what

    def _show_progress(self, progress: LabelledLine) -> None:
        phase = self._phase
        # Clients work before the line with which they are enrolled.
        if progress.label in self._clients or (phase.of_clients and progress.label != phase.phase):
            self._answered.pop(progress.label, None)
            self._working[progress.label] = progress.text
            return
        if progress.label != phase.phase:
            self._begin(PhaseLine(progress.label, 0))
        self._status = self._with_time_left(progress.text)

    def _with_time_left(self, text: str) -> str:
        """Return a progress line; if it counts, ``step 3 of 100``, with time left at its pace."""
        found = COUNTED.fullmatch(text)
        if found is None:
            return text
        now = self._now()
        words, part, total = found[1], int(found[2]), int(found[3])
        if self._counted is None or self._counted[0] != words or part <= self._counted[1]:
            self._counted = (words, part, now)
            return text
        _, first, began = self._counted
        left = (now - began) / (part - first) * (total + 1 - part)
        return f"{text}, about {duration(left)} left"

    def _note(self, note: LabelledLine) -> bool:
        """Process a line that is no progress; only the number of enrolled sites is not printed."""
        if note.label == ENROLLING:
            self._status = note.text
            return True
        if note.label == "dropped":
            site = note.text.partition(": ")[0]
            self._working.pop(site, None)
            self._answered.pop(site, None)
        elif note.label == "measured":
            when, _, figures = note.text.removeprefix("after ").partition(": ")
            before = [*self._quality.items()][: ROUNDS_SHOWN - 1]
            self._quality = {when: figures, **dict(before)}
        elif note.label == "checkpoint" and self._round is not None:
            self._finished_round = self._round[0]
        return False

    # ----- appearance -----------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield lines that fit the width; ASCII if the terminal has nothing else."""
        for line in self._lines(options.max_width, options.height or console.height):
            if options.ascii_only:
                text = line.plain.translate(ASCII).encode(options.encoding, "replace")
                line.plain = text.decode(options.encoding)
            overflow: OverflowMethod = "crop" if options.ascii_only else "ellipsis"
            line.truncate(options.max_width, overflow=overflow)
            yield line

    def _lines(self, width: int, height: int) -> Iterator[Text]:
        yield self._headline(width)
        if self._status:
            yield Text(f"  {self._status}", style="dim")
        # The other lines of the view, and one line of the log above it.
        room = max(0, min(MAX_CLIENTS, height - 5))
        active = [*self._working.items()]
        answered = [*reversed(self._answered.items())]
        shown = max(0, room - len(active))
        for site, what in active[:room]:
            yield Text.assemble((f"  {site:<{LABEL}} ", "cyan"), what)
        for site, what in answered[:shown]:
            yield Text.assemble((f"  {site:<{LABEL}} ", "dim"), (what, "dim"))
        if more := max(0, len(active) - room) + max(0, len(answered) - shown):
            yield Text(f"  and {count(more, 'more client')}", style="dim")
        if quality := self._final or self._quality:
            text = " · ".join(f"{who}: {what}" for who, what in quality.items())
            yield Text.assemble(("  quality ", "bold"), text)
        yield Text(f"  {self._time()}", style="dim")

    def _headline(self, width: int) -> Text:
        phase = self._phase
        words = [self._method, *self._rounds_in_words(), phase.phase]
        line = Text(" · ".join(words), style="bold")
        # A single step has no steps to count.
        if phase.total > 1 or phase.of_clients:
            unit = " clients" if phase.of_clients else ""
            line.append(f" {self._done}/{phase.total}{unit}")
            if (left := min(MAX_BAR, width - line.cell_len - 1)) >= MIN_BAR:
                line.append(f" {bar(self._done, phase.total, left)}")
        return line

    def _rounds_in_words(self) -> list[str]:
        if self._round is None or self._round[1] == 1:
            return []
        number, of = self._round
        return [f"{of} rounds done" if self._rounds_done() else f"round {number} of {of}"]

    def _rounds_done(self) -> bool:
        return self._round is not None and self._finished_round == self._round[1]

    def _time(self) -> str:
        """Return the elapsed time, and the time left at the pace so far."""
        now = self._now()
        phase = self._phase
        elapsed = f"{duration(now - self._began)} elapsed"
        if self._round is not None and self._round[1] > 1 and not self._rounds_done():
            what = "the rounds"
            began = self._rounds_began
            done, total = self._rounds_progress(*self._round)
        else:
            what = phase.phase
            began = self._phase_began
            done, total = float(self._done), phase.total
        if not 0 < done < total:
            return elapsed
        return f"{elapsed}, about {duration((now - began) / done * (total - done))} left of {what}"

    def _rounds_progress(self, number: int, of: int) -> tuple[float, int]:
        """Return how many rounds of this view are finished, with the part of the present one."""
        phase = self._phase
        # When the clients have answered, little of a round is left.
        part = self._done / phase.total if phase.server_round is not None else 1.0
        return number - self._first_round + part, of + 1 - self._first_round
