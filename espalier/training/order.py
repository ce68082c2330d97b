"""Which sequences a step trains on: a function of seed and step alone, so that training goes on anywhere without a memory."""

import numpy as np

from espalier.settings.seeds import derive_seed


def sequences_of_step(num_sequences: int, batch: int, step: int, seed: int) -> list[int]:
    """The ``batch`` sequences of one step.

    Steps go through the sequences epoch after epoch, each in an order of its own; a step may reach into the next epoch, and
    over several where there are fewer sequences than a batch has.
    """
    places = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {place // num_sequences for place in places}:
        generator = np.random.default_rng(derive_seed(seed, "order", server_round=epoch))
        orders[epoch] = generator.permutation(num_sequences).tolist()
    return [orders[place // num_sequences][place % num_sequences] for place in places]
