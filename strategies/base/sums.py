"""Sum of the clients' summands in a round, as a strategy reads it."""

from collections.abc import Collection
from typing import Protocol

from espalier.messages.summands import Numbers
from espalier.messages.summed_weights import WEIGHT, most_weight
from espalier.settings.run import RunSettings


class Sums(Protocol):
    """Sums of a round, by blob key and tensor name of the method's specs."""

    def tensor(self, key: str, name: str) -> Numbers:
        """Return the sum of a vector over the round's clients, as ``summands.unpack`` does."""


def total_weight(sums: Sums, run: RunSettings, clients: Collection[int]) -> int:
    """Return the sum of the clients' weights: that of their samples, or their number."""
    if most_weight(run) == 1:
        return len(clients)
    # No honest client has the weight 0.
    return max(1, int(sums.tensor(WEIGHT, WEIGHT)[0]))
