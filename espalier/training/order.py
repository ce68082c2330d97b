"""Order of the training sequences.

It is a function of seed and step, so training can continue on any machine without stored state.
"""

import numpy as np

from espalier.seeds import derive_seed


def sequences_of_step(num_sequences: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the ``batch`` sequences of one step.

    Steps go through the sequences epoch by epoch, each in a random order of its own. A step can
    reach into the next epoch, or over several epochs if there are fewer sequences than ``batch``.
    """
    places = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {place // num_sequences for place in places}:
        generator = np.random.default_rng(derive_seed(seed, "order", server_round=epoch))
        orders[epoch] = generator.permutation(num_sequences).tolist()
    return [orders[place // num_sequences][place % num_sequences] for place in places]
