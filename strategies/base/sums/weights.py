"""Sum of the clients' weights in a secure sum."""

from collections.abc import Collection

from espalier.messages.sums.summed_weights import WEIGHT, most_weight
from espalier.settings.run import RunSettings
from strategies.base.sums.unmasking import Sums


def total_weight(sums: Sums, run: RunSettings, clients: Collection[int]) -> int:
    """Return the sum of the clients' weights: that of their samples, or their number."""
    # With weights of 1 the sum of weights is the number of clients.
    if most_weight(run) == 1:
        return len(clients)
    # No honest client has the weight 0.
    return max(1, int(sums.tensor(WEIGHT, WEIGHT)[0]))
