"""Roster of a run: sites, their client numbers, and the outcome of each client."""

from dataclasses import dataclass, field
from typing import Any, Literal

from espalier.amounts import count, duration
from espalier.identity.names import printable

Status = Literal["completed", "dropped"]


MAX_REFUSED = 200
"""Maximum number of refused sites and nodes that are listed; the rest is only counted."""
BEYOND = "further nodes"

KEPT = ("status", "reason", "capability", "measured", "metrics", "capped")
"""Attributes of a seat that a checkpoint stores."""


@dataclass
class Seat:
    """One client: its number, its site, and the Flower node that answers for the site."""

    client: int
    site: str
    node_id: int
    """Flower's id of the node that last answered for the site; 0 if not seen in this process."""
    status: Status = "completed"
    reason: str = ""
    capability: float = 1.0
    """Computing speed of the site relative to other sites."""
    measured: bool = False
    """True if the node measured its capability, False if its configuration states it."""
    approval: bool = False
    """True if a person at the site approves its replies before they leave."""
    seconds: float = 0.0
    """Seconds of work in all rounds of the run."""
    rounds: int = 0
    """Number of rounds in which the client worked."""
    metrics: dict[str, Any] = field(default_factory=dict)
    capped: dict[str, dict[str, float]] = field(default_factory=dict)
    """Limits applied to this client, by name.

    A claim such as ``weight`` has the last value ``claimed``, the value ``counted``, and the number
    of rounds (``times``). A tensor such as ``update`` has the largest ``factor`` above the limit,
    and the number of tensors in all rounds (``times``).
    """
    silent: bool = False
    """True if the client finished its rounds but failed in the evaluation after them.

    It then receives no more requests, and ``reason`` gives the error.
    """
    _of_round: float = 0.0

    def worked(self, seconds: float) -> None:
        """Record ``seconds`` of work in one round."""
        self.seconds += seconds
        self.rounds += 1
        self._of_round = seconds

    def worked_after_rounds(self, seconds: float) -> None:
        """Record ``seconds`` of work that belongs to no round."""
        self.seconds += seconds

    def note(self, **metrics: Any) -> None:
        """Record metrics of a round; ``skipped_steps`` is added to that of earlier rounds."""
        if "skipped_steps" in metrics:
            metrics["skipped_steps"] += self.metrics.get("skipped_steps", 0)
        self.metrics |= metrics

    def work(self) -> str:
        """Return the working time of the last round, and of several rounds in all, as text."""
        text = f"{duration(self._of_round, tenths=True)} of work"
        if self.rounds > 1:
            text += f", {duration(self.seconds, tenths=True)} in {count(self.rounds, 'round')}"
        return text

    def limits_in_words(self) -> list[str]:
        """Return a clause for each limited claim, and one for rounds that left the client out."""
        clauses = []
        for what, note in self.capped.items():
            if what == "distance":
                clauses.append(
                    f"excluded from {count(int(note['times']), 'round')}: its update was up to"
                    f" {note['factor']:.3g} times as far from the others' as that of the median"
                    " client"
                )
            elif "claimed" in note:
                clause = f"its {what} {note['claimed']:g} was limited to {note['counted']:g}"
                if what == "weight":
                    clause += (
                        "; if the number is right, a larger federation.max-weight-ratio lets it"
                        " count"
                    )
                clauses.append(clause)
        return clauses

    def drop(self, reason: str) -> None:
        """Drop the client: its contribution does not count. The first reason is kept."""
        if self.status != "dropped":
            self.status = "dropped"
            self.reason = printable(reason)

    def leave_out(self, reason: str) -> None:
        """Exclude the client from the evaluation; its contribution to the result still counts."""
        self.silent = True
        self.reason = printable(reason)


@dataclass
class Roster:
    """All seats, by client number. A site without a seat never inherits a number."""

    seats: dict[int, Seat] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Sites (or node ids) whose enrolment was refused, with the reason; see ``refuse``."""
    _beyond: int = 0

    def active(self) -> list[Seat]:
        """Return the seats of clients that still take part, in client order."""
        return [
            seat
            for _, seat in sorted(self.seats.items())
            if seat.status == "completed" and not seat.silent
        ]

    def refuse(self, who: str, reason: str) -> str | None:
        """Record that a site or node was refused, and return the reason as it is shown.

        The result is None if there are already ``MAX_REFUSED`` entries.
        """
        who = printable(who)
        # A node that reconnects under ever new names must not fill the summary.
        if who not in self.refused and len(self.refused) >= MAX_REFUSED:
            self._beyond += 1
            self.refused[BEYOND] = f"{self._beyond} more were refused"
            return None
        self.refused[who] = printable(reason)
        return self.refused[who]

    def of_site(self, site: str) -> Seat | None:
        """Return the seat of a site, or None."""
        return next((seat for seat in self.seats.values() if seat.site == site), None)

    def clients(self) -> dict[str, int]:
        """Return the client number of each site, for the checkpoint."""
        return {seat.site: client for client, seat in sorted(self.seats.items())}

    def finished(self) -> int:
        """Return the number of clients that were not dropped."""
        return sum(seat.status == "completed" for seat in self.seats.values())

    def missing(self, asked: int) -> list[tuple[str, str]]:
        """Return the clients that are missing from the result, each with the reason.

        These are the dropped clients and, if fewer than ``asked`` sites have a seat, the refused
        sites and the number of clients that never connected. A second node with the name of a
        seated site does not count as missing.
        """
        missing = [
            (seat.site, seat.reason)
            for _, seat in sorted(self.seats.items())
            if seat.status == "dropped"
        ]
        # Refused sites only explain seats that stayed free.
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
        """Return the sites that failed in the evaluation only, each with the reason."""
        seats = [seat for _, seat in sorted(self.seats.items())]
        return [
            (seat.site, seat.reason) for seat in seats if seat.silent and seat.status == "completed"
        ]

    def times(self) -> dict[str, list[float]]:
        """Return seconds and rounds of work of each client, for a resumed run.

        They differ from run to run, so they are stored next to the checkpoint and not in it.
        """
        return {
            str(client): [seat.seconds, seat.rounds] for client, seat in sorted(self.seats.items())
        }

    def restore_times(self, times: dict[str, list[float]]) -> None:
        """Restore the values that ``times`` returned."""
        for client, seat in self.seats.items():
            seconds, rounds = times.get(str(client), (0.0, 0))
            seat.seconds = seconds
            seat.rounds = int(rounds)

    def state(self) -> list[dict[str, Any]]:
        """Return the entries of a checkpoint: one per client, without times.

        Without times, equal runs have equal checkpoints.
        """
        return [
            {"client": client, **{name: getattr(seat, name) for name in KEPT}}
            for client, seat in sorted(self.seats.items())
        ]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Restore the entries that ``state`` returned."""
        for entry in state:
            # Entries of a checkpoint that this class does not know are ignored.
            for name in entry.keys() & set(KEPT):
                setattr(self.seats[entry["client"]], name, entry[name])
