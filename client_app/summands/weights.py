"""Weight of a client as a summand."""

from collections.abc import Iterator, Mapping

import numpy as np

from espalier.messages.summands import Numbers
from espalier.messages.summed_weights import WEIGHT, most_weight
from espalier.settings.run import RunSettings


def own_weight(samples: int, run: RunSettings) -> int:
    """Return the weight of a client with so many samples: clipped, or 1 with equal weights."""
    return max(1, min(samples, most_weight(run)))


def weight_summand(weight: int, run: RunSettings) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the blob with a client's weight, unless all clients count equally."""
    if most_weight(run) > 1:
        yield WEIGHT, {WEIGHT: np.array([weight], np.uint64)}
