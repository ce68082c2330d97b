"""How far training can have moved what a client sends: a number beyond that was never trained, and its sender is left out.

Covers: values of any size that would spoil or end the run of all (a number of 1e38 leaves no client a finite loss).
Does not cover: a client that stays within the limit. It can move every number of the mean by the limit times its own share of
the weights, in any direction, in every round; with weights by samples or norms it chooses that share, within a ratio
(``client_weights.py``).
"""

import math
from collections.abc import Mapping

from torch import Tensor

from espalier.settings.training import TrainingSettings

SLACK = 2.0
"""For rounding: NF4 with error feedback makes a number at most 1.18 times as large as the largest that was ever trained (its
codes are at most 0.304 apart, so what is lost and added the next time stays below 0.152 / (1 - 0.152) of it); float32 and
bfloat16 take less. Differences are rounded likewise."""


class Reach:
    """Limits of what clients may send, by blob key and canonical name.

    A limit counts from the largest number that any client began with so far, not in this round alone: what a payload lost of
    larger numbers in earlier rounds may come with this one, also where a mean has become smaller since.

    Parameters
    ----------
    training : of a round's clients
    steps_before : steps at most that AdamW's moments have behind them when a round begins; 0 where it begins anew
    differences : clients send what training changed, not what it led to
    """

    def __init__(
        self, training: TrainingSettings, steps_before: int = 0, differences: bool = False
    ) -> None:
        growth, self.distance = _of_a_round(training, steps_before)
        self.factor = _change(training, growth) if differences else growth
        """Of the number that training began with."""
        self.starts: dict[str, float] = {}
        """Largest magnitude that clients began with, by ``<blob key>/<name>``; JSON values only."""
        self.reason = (
            f"a number is larger than {training.steps} steps of training.learning-rate ="
            f" {training.learning_rate} can make it"
        )

    def note(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Take note of what clients begin with: the tensors of one blob, by canonical name."""
        for name, tensor in tensors.items():
            place = f"{key}/{name}"
            largest = tensor.abs().max().item() if tensor.numel() else 0.0
            self.starts[place] = max(self.starts.get(place, 0.0), largest)

    def limit(self, key: str, name: str) -> float:
        """Largest magnitude that a client may send in a tensor; infinity where its optimiser has no bound."""
        start = self.starts[f"{key}/{name}"]
        return SLACK * ((self.factor * start if start else 0.0) + self.distance)


def _of_a_round(training: TrainingSettings, steps_before: int) -> tuple[float, float]:
    """``growth`` and ``distance``: a number w is at most ``growth * |w| + distance`` after a round of AdamW.

    Step t moves it by at most ``c_t`` times the learning rate (see ``largest_step``), of which the schedule's highest is taken,
    and multiplies it by ``1 - learning_rate * weight_decay`` before. Moments that are kept may be of any number of steps so
    far, as a client need not have had a part in every round.
    """
    growth = 1.0
    distance = 0.0
    rate = training.learning_rate
    decay = max(1.0, rate * training.weight_decay - 1.0)
    moves = [
        largest_step(training.beta1, training.beta2, step + 1)
        for step in range(steps_before + training.steps)
    ]
    for move in [max(moves)] * training.steps if steps_before else moves:
        growth = growth * decay
        distance = distance * decay + rate * move
    return growth, distance


def _change(training: TrainingSettings, growth: float) -> float:
    """Of a number w, ``factor * |w|`` is the most that weight decay, and rounding to float32, change of it in a round.

    A step rounds by at most ``2^-24 |w|``; twice that, as a number may grow on the way.
    """
    decay = training.learning_rate * training.weight_decay
    decayed = 1.0 - (1.0 - decay) ** training.steps if decay <= 1.0 else 1.0 + growth
    return decayed + training.steps * 2.0**-23


def largest_step(beta1: float, beta2: float, step: int) -> float:
    """``c_t``: the most that step t = 1, 2, ... of Adam moves a number, in learning rates, whatever its gradients.

    Of ``m_t = (1 - beta1) sum_k beta1^k g_(t-k)`` and ``v_t = (1 - beta2) sum_k beta2^k g_(t-k)^2``, by Cauchy and Schwarz,
    ``m_t^2 <= v_t (1 - beta1)^2 / (1 - beta2) sum_k (beta1^2 / beta2)^k``, k from 0 to t - 1; then the corrections of both.
    Kingma & Ba (2015, section 2.1) give ``(1 - beta1) / sqrt(1 - beta2)`` for a gradient that is zero in all steps but one;
    gradients that grow from step to step go further. With the default betas c_1 is 1, c_10 1.04, and none is above 7.3.
    """
    ratio = beta1**2 / beta2 if beta2 else (math.inf if beta1 else 0.0)
    if ratio == math.inf and step > 1:
        return math.inf  # a gradient of zero leaves v at zero and m not
    total = _geometric(ratio, step)
    return (1 - beta1) / (1 - beta1**step) * math.sqrt((1 - beta2**step) / (1 - beta2) * total)


def _geometric(ratio: float, terms: int) -> float:
    """``1 + ratio + ratio^2 + ...``, so many terms; infinity where it is too large for a float."""
    if ratio == math.inf or ratio == 1.0:
        return float(terms)
    try:
        return (ratio**terms - 1) / (ratio - 1)
    except OverflowError:
        return math.inf
