"""Fixed point of the change that a round of training makes to a tensor.

Both sides know the tensor that the round began with, and how far AdamW can move it
(``training_bound``). So the bound needs no message, and no training reaches it.
"""

import math

from torch import Tensor

from espalier.errors import InputError
from espalier.methods.fedpetuning import CHANGE_BITS
from espalier.settings.training import TrainingSettings
from espalier.training.training_bound import Reach
from pruning_kernels.bounded_fixed_point import Scale


def change_scale(training: TrainingSettings, begun: Tensor) -> Scale:
    """Return the fixed point of a tensor's change: the smallest power of two above the bound.

    Raises
    ------
    InputError
        If training has no finite bound.
    """
    reach = Reach(training, differences=True)
    reach.note("", {"": begun})
    bound = reach.limit("", "")
    if not math.isfinite(bound):
        raise InputError(
            f"training.learning-rate = {training.learning_rate:g}: {training.steps} steps have no"
            " finite bound, by which changes could be summed; lower it"
        )
    exponent = math.frexp(bound)[1]
    return Scale(exponent, CHANGE_BITS - exponent)
