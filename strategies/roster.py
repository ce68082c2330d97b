"""Who takes part: sites and their ranks, and what became of each in this run."""

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["completed", "dropped"]


KEPT = ("status", "reason", "capability", "measured", "metrics")
"""What a checkpoint keeps of a seat."""


@dataclass
class Seat:
    """One client: the rank that the server gave to a site, and the Flower node that the site answers from."""

    rank: int
    site: str
    node_id: int
    """Flower's id of the node that the site last answered from; 0 if it has not been seen in this process."""
    status: Status = "completed"
    reason: str = ""
    capability: float = 1.0
    """How much the site can compute, beside others."""
    measured: bool = False
    """Whether the capability was measured; if not, it was stated."""
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    silent: bool = False
    """It did its part, but failed in the evaluation that follows; it is asked nothing more, and ``reason`` says why."""

    def drop(self, reason: str) -> None:
        """The client's contribution is lost; the first reason stays."""
        if self.status != "dropped":
            self.status, self.reason = "dropped", reason

    def leave_out(self, reason: str) -> None:
        """The client's contribution counts, but not its evaluation."""
        self.silent, self.reason = True, reason


@dataclass
class Roster:
    """All seats, by rank. A site that has no seat never inherits a rank."""

    seats: dict[int, Seat] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Sites (or node ids) that enrolled and were turned away, with the reason."""

    def active(self) -> list[Seat]:
        """Seats whose client still takes part, by rank."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.status == "completed" and not seat.silent]

    def of_site(self, site: str) -> Seat | None:
        """The seat of a site."""
        return next((seat for seat in self.seats.values() if seat.site == site), None)

    def ranks(self) -> dict[str, int]:
        """Site -> rank, for the checkpoint."""
        return {seat.site: rank for rank, seat in sorted(self.seats.items())}

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of each client; no times, so that equal runs have equal checkpoints."""
        return [{"rank": rank, **{name: getattr(seat, name) for name in KEPT}} for rank, seat in sorted(self.seats.items())]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Take over what ``state`` returned."""
        for entry in state:
            for name in KEPT:
                setattr(self.seats[entry["rank"]], name, entry[name])
