"""Who takes part: sites and their numbers, and what became of each in this run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from espalier.amounts import count, duration
from espalier.wire.printable import printable

Status = Literal["completed", "dropped"]


MOST_REFUSED = 200
"""Refused sites and nodes that are told one by one; further ones are counted."""
BEYOND = "further nodes"

KEPT = ("status", "reason", "capability", "measured", "metrics", "capped")
"""What a checkpoint keeps of a seat."""


@dataclass
class Seat:
    """One client: the number that the server gave to a site, and the Flower node that the site answers from."""

    client: int
    site: str
    node_id: int
    """Flower's id of the node that the site last answered from; 0 if it has not been seen in this process."""
    status: Status = "completed"
    reason: str = ""
    capability: float = 1.0
    """How much the site can compute, beside others."""
    measured: bool = False
    """Whether the capability was measured; if not, it was stated."""
    approval: bool = False
    """True if a person at the site approves its replies before they leave."""
    seconds: float = 0.0
    """Of all its work in the run."""
    rounds: int = 0
    """In which it worked."""
    metrics: dict[str, Any] = field(default_factory=dict)
    capped: dict[str, dict[str, float]] = field(default_factory=dict)
    """Limits applied to this client, by name. For a claim such as ``weight``: the last value
    ``claimed``, the value ``counted``, and the number of rounds (``times``). For a tensor such as
    ``update``: the largest ``factor`` above the limit, and the number of tensors in all rounds."""
    silent: bool = False
    """It did its part, but failed in the evaluation that follows; it is asked nothing more, and ``reason`` says why."""
    _of_round: float = 0.0

    def worked(self, seconds: float) -> None:
        """It worked for a round."""
        self.seconds += seconds
        self.rounds += 1
        self._of_round = seconds

    def work(self) -> str:
        """How long it worked, in words: in its last round, and in all of them if there were more."""
        of_round = f"{duration(self._of_round, tenths=True)} of work"
        return (
            of_round
            if self.rounds == 1
            else (
                f"{of_round}, {duration(self.seconds, tenths=True)} in"
                f" {count(self.rounds, 'round')}"
            )
        )

    def limits_in_words(self) -> list[str]:
        """Return a clause for each claim that was limited, and for rounds that the client was left out of."""
        found = []
        for what, note in self.capped.items():
            if what == "distance":
                found.append(
                    f"left out of {count(int(note['times']), 'round')}: its update was up to"
                    f" {note['factor']:.3g} times as far from the others' as the median client's"
                )
            elif "claimed" in note:
                found.append(f"its {what} {note['claimed']:g} counted as {note['counted']:g}")
        return found

    def drop(self, reason: str) -> None:
        """The client's contribution is lost; the first reason stays."""
        if self.status != "dropped":
            self.status = "dropped"
            self.reason = printable(reason)

    def leave_out(self, reason: str) -> None:
        """The client's contribution counts, but not its evaluation."""
        self.silent = True
        self.reason = printable(reason)


@dataclass
class Roster:
    """All seats, by client. A site that has no seat never inherits a number."""

    seats: dict[int, Seat] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Sites (or node ids) that enrolled and were turned away, with the reason; see ``refuse``."""
    _beyond: int = 0

    def active(self) -> list[Seat]:
        """Seats whose client still takes part, by client."""
        return [
            seat
            for _, seat in sorted(self.seats.items())
            if seat.status == "completed" and not seat.silent
        ]

    def refuse(self, who: str, reason: str) -> str | None:
        """Note that a site, or node, was turned away; returns the reason as it is shown, None if there were too many."""
        who = printable(who)
        if who not in self.refused and len(self.refused) >= MOST_REFUSED:
            self._beyond += 1
            self.refused[BEYOND] = f"{self._beyond} more were turned away"
            return None
        self.refused[who] = printable(reason)
        return self.refused[who]

    def of_site(self, site: str) -> Seat | None:
        """The seat of a site."""
        return next((seat for seat in self.seats.values() if seat.site == site), None)

    def clients(self) -> dict[str, int]:
        """Site -> client, for the checkpoint."""
        return {seat.site: client for client, seat in sorted(self.seats.items())}

    def finished(self) -> int:
        """How many clients did their part."""
        return sum(seat.status == "completed" for seat in self.seats.values())

    def missing(self, asked: int) -> list[tuple[str, str]]:
        """Who of the ``asked`` clients did not do its part, and why: dropped ones, and where seats are free, those refused.

        A second node with the name of a seat's site is none of them.
        """
        missing = [
            (seat.site, seat.reason)
            for _, seat in sorted(self.seats.items())
            if seat.status == "dropped"
        ]
        free = max(0, asked - len(self.seats))
        if not free:
            return missing
        refused = [
            (who, f"refused: {why}")
            for who, why in sorted(self.refused.items())
            if self.of_site(who) is None
        ]
        never = max(0, free - len(refused))
        return missing + refused + [("a client", "never connected")] * never

    def not_evaluated(self) -> list[tuple[str, str]]:
        """Who did its part and failed in the evaluation, and why."""
        seats = [seat for _, seat in sorted(self.seats.items())]
        return [
            (seat.site, seat.reason) for seat in seats if seat.silent and seat.status == "completed"
        ]

    def times(self) -> dict[str, list[float]]:
        """Seconds and rounds of each client's work, for a resumption; they differ from run to run and are in no checkpoint."""
        return {
            str(client): [seat.seconds, seat.rounds] for client, seat in sorted(self.seats.items())
        }

    def restore_times(self, times: dict[str, list[float]]) -> None:
        """Take over what ``times`` returned."""
        for client, seat in self.seats.items():
            seconds, rounds = times.get(str(client), (0.0, 0))
            seat.seconds = seconds
            seat.rounds = int(rounds)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of each client; no times, so that equal runs have equal checkpoints."""
        return [
            {"client": client, **{name: getattr(seat, name) for name in KEPT}}
            for client, seat in sorted(self.seats.items())
        ]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Take over what ``state`` returned."""
        for entry in state:
            for name in entry.keys() & set(KEPT):
                setattr(self.seats[entry["client"]], name, entry[name])
