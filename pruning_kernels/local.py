"""One client's prune mask of one matrix: score, then select (FedPrLLM section 3.2, step 1)."""

from typing import Literal

from torch import Tensor

from pruning_kernels.scores import magnitude_score, wanda_score
from pruning_kernels.selection import ComparisonGroup, select_lowest

LocalMetric = Literal["wanda", "magnitude"]


def local_prune_mask(
    weight: Tensor, input_square_sum: Tensor, metric: LocalMetric, sparsity: float, group: ComparisonGroup
) -> Tensor:
    """Prune mask of one matrix, bool, shaped like ``weight``; see ``scores`` and ``selection`` for the arguments."""
    scores = wanda_score(weight, input_square_sum) if metric == "wanda" else magnitude_score(weight)
    return select_lowest(scores, sparsity, group)
