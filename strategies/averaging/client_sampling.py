"""Selection of a round's clients by the run's seed, the same in an estimate and in the run."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings

S = TypeVar("S")


def drawn(settings: RunSettings, server_round: int, seats: Sequence[S]) -> list[S]:
    """Return the seats that a round asks, in their order.

    All seats are returned if ``federation.sampled-clients`` is 1.
    """
    number = settings.federation.clients_of_round(len(seats))
    if number >= len(seats):
        return list(seats)
    generator = np.random.default_rng(
        derive_seed(settings.seed, "clients", server_round=server_round)
    )
    return [
        seats[place]
        for place in sorted(generator.choice(len(seats), number, replace=False).tolist())
    ]
