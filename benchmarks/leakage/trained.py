"""Attack on tensors that clients trained, or fitted to their text: the loss of known text.

The score of a sample is the decrease of its loss by the reply, compared with that by replies which
the attacker trained on text of its own, with the same settings. Without this comparison, samples
that any training makes easier would be taken for members. With DP-SGD each passage of a client
takes part in each step with a probability only; all samples of its text count as used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, figures
from benchmarks.leakage.layer_replies import KeptWeights, Layer
from benchmarks.leakage.trained_replies import (
    Adapters,
    Generator,
    InnerMatrices,
    LastBlocks,
    OfDevices,
    OwnRank,
    Stacked,
    TrainedReplies,
)
from benchmarks.membership.kinds import TUNING
from espalier.models.adapters import Tensors

SAMPLING_RATE = 0.25
"""Probability with which a record takes part in a step of DP-SGD."""


TRAINED: dict[str, type[TrainedReplies]] = {
    "FedPETuning, adapters of one round": Adapters,
    "HetLoRA, adapters of one round": OwnRank,
    "FLoRA, adapters of one round": Stacked,
    "FedSpine, adapters of one round": OfDevices,
    "Fed-SB, inner matrices": InnerMatrices,
    "FedSODA, adapters of the last blocks": LastBlocks,
    "SFT-P, generator with LoRA": Generator,
    "LLM-Streamline, layer": Layer,
    "FedSpaLLM, masks and kept weights": KeptWeights,
}
"""Kinds of trained replies by name."""


def private_tuning(epsilon: float) -> dict[str, Any]:
    """Return the settings of the attacked tuning with differential privacy.

    A record is one passage. The noise follows from the seed, so that a measurement repeats; the
    attacker does not use the seed.
    """
    return {
        **TUNING,
        "privacy.epsilon": epsilon,
        "privacy.noise": "seed",
        "privacy.sampling-rate": SAMPLING_RATE,
        "federation.client-weights": "equal",
        "evaluation.local-baseline": False,
    }


def mean_of(replies: Sequence[Tensors]) -> Tensors:
    """Return the mean of each tensor, which a secure sum shows with equal weights."""
    return {
        key: {
            name: torch.stack([own[key][name].double() for own in replies]).mean(dim=0).float()
            for name in tensors
        }
        for key, tensors in replies[0].items()
    }


def losses_by(kind: TrainedReplies, samples: Tensor, replies: Sequence[Tensors]) -> Tensor:
    """Return the loss of each sample by each reply: (replies, samples), float64."""
    return torch.stack([kind.losses(samples, reply) for reply in replies])


class TrainedAttack:
    """Attack on one kind of trained replies."""

    def __init__(self, sets: DataSets, kind: TrainedReplies) -> None:
        self.sets = sets
        self.kind = kind
        self.replies = kind.of(range(sets.used))
        self.known = torch.cat(sets.candidates(kind.run))
        self.usual = losses_by(kind, self.known, kind.of(sets.reference_clients)).mean(dim=0)
        """Loss of each candidate after training on other text of the same kind."""

    def alone(self) -> Figures:
        """Attack every client's reply."""
        return self._figures(self.replies, 1)

    def summed(self, together: int) -> Figures:
        """Attack the mean of the replies of several clients."""
        return self._figures(
            [
                mean_of(self.replies[first : first + together])
                for first in range(0, self.sets.used, together)
            ],
            together,
        )

    def _figures(self, replies: Sequence[Tensors], together: int) -> Figures:
        # The loss before training is the same in both terms.
        scores = self.usual - losses_by(self.kind, self.known, replies)
        return figures(scores, self.sets.members(together), self.sets.samples)
