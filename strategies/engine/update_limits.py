"""Limits on how far one client's update goes: its change of a tensor counts up to a multiple of the median client's.

Covers: an update that is scaled up, or turned round, by one client of several; also factors of which one is huge and the other
tiny, since each factor is compared with what the clients began with.
Does not cover: a direction. A client may send the opposite of what it learned, as large as that multiple; then a round of eight
goes about half as far. Nor several clients together, nor rounds of one or two clients.
"""

from collections.abc import Mapping
from typing import Any

from espalier.amounts import count
from pruning_kernels.clipping import clip_factors
from strategies.engine.rounds import Rounds

LARGEST_TOLD = 1e15
"""Largest factor that is reported, for a tensor that was clipped to zero."""


class UpdateLimits:
    """Clipping of one round's updates, and who was clipped.

    Parameters
    ----------
    most_ratio : ``federation.max-update-ratio``
    """

    def __init__(self, most_ratio: float) -> None:
        self.most_ratio = most_ratio
        self._clipped: dict[int, dict[Any, float]] = {}
        """Factor above the limit of each clipped tensor, by client."""

    def factors(self, place: Any, sizes: Mapping[int, float]) -> dict[int, float]:
        """Return ``clip_factors`` of one tensor's changes, and remember who was clipped; ``place`` names the tensor."""
        found = clip_factors(sizes, self.most_ratio)
        for client, factor in found.items():
            if factor < 1:
                self.note(client, place, sizes[client], factor * sizes[client])
        return found

    def note(self, client: int, place: Any, claimed: float, counted: float) -> None:
        """Remember that something of a client's counts less, or more, than it sent; ``place`` names what."""
        low, high = sorted((claimed, counted))
        self._clipped.setdefault(client, {})[place] = (
            min(high / low, LARGEST_TOLD) if low > 0 else LARGEST_TOLD
        )

    def tell(self, rounds: Rounds, what: str = "update") -> None:
        """Note on the seats who was clipped in the round, how often and how much; a line of progress for each.

        ``what`` was: ``update``, ``moments`` and so on; ``distance`` of updates that are left out for theirs.
        """
        for client, places in sorted(self._clipped.items()):
            seat = rounds.roster.seats[client]
            factor = max(places.values())
            before = seat.capped.get(what, {})
            times = before.get("times", 0) + len(places)
            most = max(before.get("factor", 0.0), factor)
            seat.capped[what] = {"factor": most, "times": times}
            text = (
                f"limited      {seat.site}: its {what} in {count(len(places), 'place')}, by a"
                f" factor of up to {factor:.3g}"
            )
            if what == "distance":
                text = (
                    f"left out     {seat.site}: its update is {factor:.3g} times as far from the"
                    " others' as the median client's"
                )
            note = {"factor": factor, "places": len(places)}
            rounds.progress.note("limited", text, client=client, site=seat.site, what=what, **note)
        self._clipped = {}
