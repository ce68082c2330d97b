"""HetLoRA at a client: adapter averaging, with rank self-pruning after a round's training.

Source: Cho et al. 2024.
The paper considers one matrix and one rank per client. Here all matrices of a client share its
rank, and the criterion is the sum over them: ``sum ||B[:, gamma r:]|| ||A[gamma r:, :]||``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.methods.tuning import adapter_averaging
from client_app.methods.tuning.adapter_averaging import evaluate, local_baseline
from client_app.site import Site
from espalier.messages.message import MessageBody
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.plan import block_key
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factors import Factors, kept_rank, self_prune_rank, tail_norm

__all__ = ["SelfPruning", "evaluate", "local_baseline", "train"]


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the round's adapters and reply with the first part. Each round is answered once."""
    return adapter_averaging.train(site, request, rank_pruning=SelfPruning.of)


@dataclass(frozen=True)
class SelfPruning:
    """Self-pruning of one client in one round."""

    adapters: AdapterPlan
    """Adapters of the client, with a rank of at most ``rank``."""
    rank: int
    """Rank at the start of the round."""
    gamma: float
    regularisation: float
    """Regularization strength, the paper's lambda."""

    @staticmethod
    def of(settings: RunSettings, adapters: AdapterPlan, rank: int) -> "SelfPruning | None":
        """Return the self-pruning that the settings define.

        The result is None without self-pruning, and if no matrix has a rank that could be removed.
        """
        if not settings.of(AdapterAveraging).lowers_ranks:
            return None
        job = settings.of(HetLoRASettings)
        pruning = SelfPruning(adapters, rank, job.gamma, job.regularisation)
        # Matrices may be smaller than the rank; a rank that none has cannot be removed.
        return pruning if any(adapter.rank > pruning.kept for _, adapter in adapters) else None

    @property
    def kept(self) -> int:
        """Rank that remains if the client prunes; it is also the index of the first tail rank."""
        return kept_rank(self.rank, self.gamma)

    def tail(self, tensors: Tensors) -> Tensor:
        """Return the sum of the tail norms of all matrices, a float32 scalar.

        It has a gradient if the tensors have one.
        """
        norms = []
        for index, adapter in self.adapters:
            block = tensors[block_key(index)]
            # Matrices whose own rank is below the tail have none.
            if adapter.rank > self.kept:
                norms.append(
                    tail_norm(
                        Factors(block[adapter.name_b], block[adapter.name_a], adapter.scaling),
                        self.kept,
                    )
                )
        return torch.stack(norms).sum()

    @property
    def penalty(self) -> Callable[[Tensors], Tensor] | None:
        """Regularization term of the training loss: lambda times the tail; None if lambda is 0."""
        if self.regularisation == 0:
            return None
        return lambda tensors: self.regularisation * self.tail(tensors)

    def rank_after(self, before: Tensors, after: Tensors) -> int:
        """Return the rank for the next round: the lower one if training made the tail smaller.

        In the first round nothing is pruned, because B is zero at the start and no tail is smaller
        than that. Raises NotFiniteError if a tail contains NaN or infinity.
        """
        return self_prune_rank(
            self.rank, self.gamma, float(self.tail(before)), float(self.tail(after))
        )
