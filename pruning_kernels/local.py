"""One client's prune mask of one matrix: score, then select (FedPrLLM section 3.2, step 1)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.scores import ria_score, wanda_factors
from pruning_kernels.selection import ComparisonGroup, select_lowest

LocalMetric = Literal["wanda", "magnitude", "ria"]


@dataclass(frozen=True)
class LocalPruning:
    """How one party chooses what it would prune."""

    metric: LocalMetric
    sparsity: float
    group: ComparisonGroup

    def prune_mask(self, weight: Tensor, input_square_sum: Tensor) -> Tensor:
        """Prune mask of one matrix, bool, shaped like ``weight``; see ``scores`` and ``selection`` for the arguments.

        Raises
        ------
        NotFiniteError
            A weight or an activation is NaN or infinite.
        """
        if self.metric == "ria":
            return select_lowest(ria_score(weight, input_square_sum), self.sparsity, self.group)
        factors = torch.ones(weight.shape[1])
        if self.metric == "wanda":
            norms = wanda_factors(weight, input_square_sum)
            factors = norms if self.group != "column" else factors  # a column's weights share one norm, which may be zero
        return select_lowest(weight, self.sparsity, self.group, factors.to(weight.device))
