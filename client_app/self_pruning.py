"""Rank self-pruning at a client of HetLoRA (Cho et al. 2024): which of its ranks it goes on with after a round's training.

The paper writes of one matrix, and of one rank per client. Here a client's matrices share its rank, and what it compares is the
sum over them: ``sum ||B[:, gamma r:]|| ||A[gamma r:, :]||``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.hetlora import HetLoRASettings
from espalier.settings.run import RunSettings
from espalier.wire.adapters import AdapterPlan, Tensors
from espalier.wire.payload import block_key
from pruning_kernels.factor_ranks import kept_rank, self_prune_rank, tail_norm
from pruning_kernels.factors import Factors


@dataclass(frozen=True)
class SelfPruning:
    """One client's self-pruning in one round."""

    adapters: AdapterPlan
    """The client's, of at most ``rank``."""
    rank: int
    """With which it begins."""
    gamma: float
    regularisation: float
    """The paper's lambda."""

    @staticmethod
    def of(settings: RunSettings, adapters: AdapterPlan, rank: int) -> "SelfPruning | None":
        """What the settings say; None without self-pruning, and where no matrix has a rank to give up."""
        if not settings.of(AdapterAveraging).lowers_ranks:
            return None
        job = settings.of(HetLoRASettings)
        pruning = SelfPruning(adapters, rank, job.gamma, job.regularisation)
        return pruning if any(adapter.rank > pruning.kept for _, adapter in adapters) else None

    @property
    def kept(self) -> int:
        """Rank that is left if the client gives some up: the tail starts there."""
        return kept_rank(self.rank, self.gamma)

    def tail(self, tensors: Tensors) -> Tensor:
        """Sum over all matrices of the norms of their last ranks; one number, float32, with a gradient if they have one."""
        found = []
        for index, adapter in self.adapters:
            block = tensors[block_key(index)]
            if adapter.rank > self.kept:
                found.append(
                    tail_norm(
                        Factors(block[adapter.name_b], block[adapter.name_a], adapter.scaling),
                        self.kept,
                    )
                )
        return torch.stack(found).sum()

    def penalty(self, tensors: Tensors) -> Tensor:
        """What is added to the training loss: lambda times the tail."""
        return self.regularisation * self.tail(tensors)

    def rank_after(self, before: Tensors, after: Tensors) -> int:
        """Rank to go on with: the lower one if training made the tail smaller.

        In the first round nothing is given up: B is zero before, and nothing is smaller.

        Raises
        ------
        NotFiniteError
            A tail holds NaN or infinity.
        """
        return self_prune_rank(
            self.rank, self.gamma, float(self.tail(before)), float(self.tail(after))
        )
