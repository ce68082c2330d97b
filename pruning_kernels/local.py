"""How one party prunes one matrix: score, then select (FedPrLLM section 3.2, step 1); SparseGPT adjusts what it keeps."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels import sparsegpt
from pruning_kernels.comparison_groups import ComparisonGroup, parse_pattern
from pruning_kernels.scores import ria_factors, ria_sums, wanda_factors
from pruning_kernels.selection import select_lowest
from pruning_kernels.sparsegpt import PAPER_DAMPING, Factor, sparsegpt_score

LocalMetric = Literal["wanda", "magnitude", "ria", "sparsegpt"]

DampingMean = Literal["live", "all"]
"""Channels that fire, or all of them, of which dead ones count as 1, as in SparseGPT's published code (see ``factorise``)."""

InputStatistics = Tensor | Factor
"""What pruning knows of a linear's inputs: their square sums per channel, or for SparseGPT the factor of their gram."""


@dataclass(frozen=True)
class LocalPruning:
    """How one party chooses what it would prune."""

    metric: LocalMetric
    sparsity: float
    group: ComparisonGroup
    damping: float = PAPER_DAMPING
    """SparseGPT: share of the gram's mean diagonal that is added to it."""
    damping_mean: DampingMean = "live"
    """SparseGPT: the channels of that mean."""

    @property
    def needs_grams(self) -> bool:
        """Whether the inputs' grams are asked for, and not their square sums."""
        return self.metric == "sparsegpt"

    def prune_mask(self, weight: Tensor, inputs: InputStatistics) -> Tensor:
        """Prune mask of one matrix, bool, shaped like ``weight``; see ``scores`` and ``selection``.

        Raises
        ------
        NotFiniteError
            A weight or an activation is NaN or infinite.
        """
        if isinstance(inputs, Factor):
            return select_lowest(sparsegpt_score(weight, inputs), self.sparsity, self.group)
        if self.metric == "ria":
            return select_lowest(
                weight, self.sparsity, self.group, ria_factors(weight, inputs), ria_sums(weight)
            )
        factors = torch.ones(weight.shape[1])
        if self.metric == "wanda":
            norms = wanda_factors(weight, inputs)
            # A column's weights share one norm, which may be zero.
            factors = norms if self.group != "column" else factors
        return select_lowest(weight, self.sparsity, self.group, factors.to(weight.device))

    def prune(self, weight: Tensor, inputs: InputStatistics) -> tuple[Tensor, Tensor]:
        """Prune mask and the pruned weight, both shaped like ``weight``; SparseGPT updates the kept weights as well.

        Raises
        ------
        NotFiniteError
            A weight or an activation is NaN or infinite, or a weight became so.
        """
        if isinstance(inputs, Factor):
            return sparsegpt.prune(weight, inputs, self.sparsity, parse_pattern(self.group))
        prune_mask = self.prune_mask(weight, inputs)
        return prune_mask, weight.masked_fill(prune_mask, 0)
