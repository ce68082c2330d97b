"""Local pruning of one matrix by one party: scores, then selection (FedPrLLM section 3.2, step 1).

SparseGPT also updates the kept weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels import sparsegpt
from pruning_kernels.selection.comparison_groups import ComparisonGroup, parse_pattern
from pruning_kernels.selection.scores import ria_factors, ria_sums, wanda_factors
from pruning_kernels.selection.selection import select_lowest
from pruning_kernels.sparsegpt import Factor, sparsegpt_score

LocalMetric = Literal["wanda", "magnitude", "ria", "sparsegpt"]

DampingMean = Literal["live", "all"]
"""Channels over which the mean diagonal for damping is taken.

- ``live``: channels that are not zero for every token
- ``all``: all channels; dead ones count as 1, as in SparseGPT's published code (see ``factorise``)
"""

InputStatistics = Tensor | Factor
"""Square sum of each input channel, (channels,), or for SparseGPT the Gram matrix's factor."""


@dataclass(frozen=True)
class LocalPruning:
    """Settings of a party's local pruning."""

    metric: LocalMetric
    sparsity: float
    group: ComparisonGroup
    damping_mean: DampingMean = "live"

    def prune_mask(self, weight: Tensor, inputs: InputStatistics) -> Tensor:
        """Return the prune mask of one matrix, bool, shaped like ``weight``.

        Raises
        ------
        NotFiniteError
            A weight or an activation is NaN or infinite.
        """
        # SparseGPT's input is a factor of the Gram matrix; the metric is implied by its type.
        if isinstance(inputs, Factor):
            return select_lowest(sparsegpt_score(weight, inputs), self.sparsity, self.group)
        if self.metric == "ria":
            return select_lowest(
                weight, self.sparsity, self.group, ria_factors(weight, inputs), ria_sums(weight)
            )
        factors = torch.ones(weight.shape[1])
        if self.metric == "wanda":
            norms = wanda_factors(weight, inputs)
            # The weights of a column share one norm. It does not change their order unless it is 0,
            # and then all scores would be equal.
            factors = norms if self.group != "column" else factors
        return select_lowest(weight, self.sparsity, self.group, factors.to(weight.device))

    def prune(self, weight: Tensor, inputs: InputStatistics) -> tuple[Tensor, Tensor]:
        """Return the prune mask and the pruned weight, both shaped like ``weight``.

        SparseGPT updates the kept weights as well.

        Raises
        ------
        NotFiniteError
            A weight or an activation is NaN or infinite, or a weight became so.
        """
        if isinstance(inputs, Factor):
            return sparsegpt.prune(weight, inputs, self.sparsity, parse_pattern(self.group))
        prune_mask = self.prune_mask(weight, inputs)
        return prune_mask, weight.masked_fill(prune_mask, 0)
