"""Bounds on the numbers that a client may send, from the maximum effect of training.

A client that exceeds them is left out of the round.

Covers: values of any size that would damage or end the run (one number of 1e38 leaves no client
with a finite loss).
Does not cover: a client that stays within the bounds. It can move every number of the mean by the
bound times its own weight, in any direction, in every round. With weights by samples or norms, it
chooses its weight within a ratio (``client_weights.py``).
"""

import math
from collections.abc import Mapping

from torch import Tensor

from espalier.settings.tables.training import BETAS, TrainingSettings

SLACK = 2.0
"""Allowance for rounding.

NF4 with error feedback makes a number at most 1.18 times as large as the largest trained number:
its codes are at most 0.304 apart, so the error that is added in the next round stays below 0.152 /
(1 - 0.152) of it. Float32 and bfloat16 need less. Differences are rounded in the same way.
"""


class Reach:
    """Bounds on the numbers that clients may send, by blob key and canonical name.

    A bound refers to the largest number with which any client has begun so far, not only in this
    round. Rounding errors of larger numbers in earlier rounds may arrive with this one, even if a
    mean has become smaller since. ``differences`` is True if clients send the change by training,
    and ``starts`` has the largest initial magnitudes, if several bounds have them in common.
    """

    def __init__(
        self,
        training: TrainingSettings,
        differences: bool = False,
        starts: dict[str, float] | None = None,
    ) -> None:
        growth, self.distance = _of_a_round(training)
        self.factor = growth
        """Factor on the magnitude of the initial number."""
        if differences:
            # Decay and float32 rounding change a number w in a round. A step rounds by at most
            # 2^-24 |w|; twice that is used, because a number may grow during the round.
            decay = training.learning_rate * training.weight_decay
            # A decay above 1 turns the sign of w, so w changes by up to itself and its new size.
            kept = (1.0 - decay) ** training.steps if decay <= 1.0 else -growth
            self.factor = 1.0 - kept + training.steps * 2.0**-23
        self.starts = {} if starts is None else starts
        """Largest initial magnitude, by ``<blob key>/<name>``; JSON values only."""
        self.reason = (
            f"a number is larger than {training.steps} steps of training.learning-rate ="
            f" {training.learning_rate} can make it"
        )

    def note(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Record the initial tensors of one blob, by canonical name."""
        for name, tensor in tensors.items():
            place = f"{key}/{name}"
            largest = tensor.abs().max().item() if tensor.numel() else 0.0
            # The maximum over all rounds; see the class.
            self.starts[place] = max(self.starts.get(place, 0.0), largest)

    def limit(self, key: str, name: str) -> float:
        """Return the largest magnitude that a client may send in a tensor; it may be infinite."""
        start = self.starts[f"{key}/{name}"]
        # ``factor`` may be infinite, and infinity times 0 would be NaN.
        return SLACK * ((self.factor * start if start else 0.0) + self.distance)


def _of_a_round(training: TrainingSettings) -> tuple[float, float]:
    """Return ``growth`` and ``distance`` of one round of AdamW.

    After the round, a number w is at most ``growth * |w| + distance``. Step t of AdamW first
    multiplies w by ``1 - learning_rate * weight_decay``, then moves it by at most ``c_t`` learning
    rates (see ``largest_step``). The schedule's highest rate is used.
    """
    growth = 1.0
    distance = 0.0
    rate = training.learning_rate
    # 1 - rate * decay is negative for large products; its magnitude then grows.
    decay = max(1.0, rate * training.weight_decay - 1.0)
    for step in range(training.steps):
        growth = growth * decay
        distance = distance * decay + rate * largest_step(step + 1)
    return growth, distance


def largest_step(step: int) -> float:
    """Return ``c_t``, the largest move of step t = 1, 2, ... of Adam in learning rates.

    It holds for any gradients. With ``m_t = (1 - beta1) sum_k beta1^k g_(t-k)`` and ``v_t = (1 -
    beta2) sum_k beta2^k g_(t-k)^2``, k from 0 to t - 1, the Cauchy-Schwarz inequality gives ``m_t^2
    <= v_t (1 - beta1)^2 / (1 - beta2) sum_k (beta1^2 / beta2)^k``. The bias corrections of both
    follow. Kingma & Ba (2015, section 2.1) give ``(1 - beta1) / sqrt(1 - beta2)`` for a gradient
    that is zero in all steps but one; gradients that grow from step to step go further. c_1 is 1,
    c_10 is 1.04, and no c_t exceeds 7.3.
    """
    beta1, beta2 = BETAS
    ratio = beta1**2 / beta2
    # Geometric series of the Cauchy-Schwarz bound.
    total = (ratio**step - 1) / (ratio - 1)
    return (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2) * total)
