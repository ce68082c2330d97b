"""Weights of clients in a mean of which the server learns only sums.

A client multiplies its numbers by its weight, and the weight is a summand too. Without weights by
samples each client counts 1, and the server knows the number of clients.
"""

import numpy as np

from espalier.messages.sums.summands import Numbers, SumSpec, bits_for
from espalier.settings.run import RunSettings

WEIGHT = "weight"
"""Blob key and tensor name of the weight."""
WITHHELD = ("samples", "damping")
"""Fields of reports that follow from a client's data: with secure sums they are reported as 0.

The weight is a summand, and FedSpaLLM's damping is shown in the summary of other runs only.
"""
MAX_WEIGHT = 1_000_000
"""Maximum weight of a client; more samples count as this number."""


def most_weight(run: RunSettings) -> int:
    """Return the maximum weight of a client in a run."""
    return MAX_WEIGHT if run.federation.client_weights == "samples" else 1


def weight_specs(run: RunSettings) -> dict[str, dict[str, SumSpec]]:
    """Return the specs of the weight's blob; empty if all clients count equally."""
    max_weight = most_weight(run)
    if max_weight == 1:
        return {}
    return {WEIGHT: {WEIGHT: SumSpec(1, bits_for(run.num_clients * max_weight))}}


def own_weight(samples: int, run: RunSettings) -> int:
    """Return the weight of a client by its number of samples, clipped; 1 with equal weights."""
    return max(1, min(samples, most_weight(run)))


def weight_summand(weight: int) -> dict[str, Numbers]:
    """Return the summand of the weight's blob."""
    return {WEIGHT: np.array([weight], np.uint64)}
