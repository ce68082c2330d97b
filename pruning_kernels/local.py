"""One client's prune mask of one matrix: score, then select (FedPrLLM section 3.2, step 1)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pruning_kernels.scores import magnitude_score, ria_score, wanda_score
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
        if self.metric == "magnitude":
            scores = magnitude_score(weight)
        elif self.metric == "ria":
            scores = ria_score(weight, input_square_sum)
        else:
            scores = wanda_score(weight, input_square_sum)
        return select_lowest(scores, self.sparsity, self.group)
