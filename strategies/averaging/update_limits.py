"""Limits on the size of one client's update, relative to the update of the median client.

Covers: an update of one client of several that is scaled up or has its sign reversed. Also factors
of which one is huge and the other tiny, because each factor is compared with its value before
training.
Does not cover: the direction of an update. A client may send the opposite of what it learned,
scaled up to the limit; a round of eight clients then makes about half the progress. Does not cover
several clients that work together, or rounds of one or two clients.
"""

from collections.abc import Mapping
from typing import Any

from espalier.amounts import count
from pruning_kernels.lora.clipping import clip_factors
from strategies.base.rounds import Rounds

LARGEST_TOLD = 1e15
"""Largest factor that is reported; a tensor that was clipped to zero has no finite one."""


class UpdateLimits:
    """Clipping of the updates of one round, and a record of the clipped clients.

    Parameters
    ----------
    most_ratio : maximum size of an update as a multiple of the median
        (``federation.max-update-ratio``)
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._clipped: dict[int, dict[Any, float]] = {}
        """Factor by which each clipped tensor exceeded the limit, by client."""

    def factors(self, place: Any, sizes: Mapping[int, float]) -> dict[int, float]:
        """Return ``clip_factors`` for the changes of one tensor, and record the clipped clients.

        Parameters
        ----------
        place : name of the tensor
        sizes : norm of the change, by client
        """
        found = clip_factors(sizes, self.max_ratio)
        for client, factor in found.items():
            if factor < 1:
                self.note(client, place, sizes[client], factor * sizes[client])
        return found

    def note(self, client: int, place: Any, claimed: float, counted: float) -> None:
        """Record that a value of a client counts less, or more, than the client sent.

        Parameters
        ----------
        client : number of the client
        place : name of the value
        claimed : value that the client sent
        counted : value that is used
        """
        low, high = sorted((claimed, counted))
        self._clipped.setdefault(client, {})[place] = (
            min(high / low, LARGEST_TOLD) if low > 0 else LARGEST_TOLD
        )

    def tell(self, rounds: Rounds, what: str = "update") -> None:
        """Record the clipped clients on their seats, and show a progress line for each.

        Parameters
        ----------
        rounds : rounds whose roster and progress are used
        what : kind of the limited values, such as ``update`` or ``moments``; ``distance`` for
            updates that are left out because they are far from the others
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
