"""Which weights one client prunes: the lowest scores of each comparison group, in exact number."""

from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.scores import NotFiniteError

ComparisonGroup = Literal["layer", "row", "column"]
"""Weights that compete with each other: the whole matrix, one output row, or one input column (FedPrLLM 3.2.1)."""


def pruned_per_group(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Number of weights that every comparison group of a matrix loses: ``int(group size * sparsity)``."""
    rows, columns = shape
    size = {"layer": rows * columns, "row": columns, "column": rows}[group]
    return int(size * sparsity)


def pruned_in_matrix(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Number of weights that a matrix loses when every comparison group loses its exact share."""
    rows, columns = shape
    groups = {"layer": 1, "row": rows, "column": columns}[group]
    return groups * pruned_per_group(shape, sparsity, group)


def select_lowest(scores: Tensor, sparsity: float, group: ComparisonGroup) -> Tensor:
    """Prune the lowest scores of each comparison group (Wanda's selection; the paper's local step 1).

    Parameters
    ----------
    scores : (out_features, in_features), float
    sparsity : share of each group to prune, in [0, 1)
    group : see ``ComparisonGroup``

    Returns
    -------
    Tensor
        bool, True where the weight is pruned. Each group loses exactly ``int(group size * sparsity)`` weights; among equal
        scores the lower index goes first (row-major index in a layer).

    Raises
    ------
    NotFiniteError
        A score is NaN, so that there is no order.
    """
    if bool(torch.isnan(scores).any()):
        raise NotFiniteError("the scores contain NaN and cannot be compared; check the model's weights")
    rows, columns = scores.shape
    lines = {"layer": scores.reshape(1, -1), "row": scores, "column": scores.T}[group]
    lowest = torch.sort(lines, dim=1, stable=True).indices[:, : pruned_per_group((rows, columns), sparsity, group)]
    prune_mask = torch.zeros(lines.shape, dtype=torch.bool, device=scores.device).scatter_(1, lowest, True)
    if group == "column":
        return prune_mask.T.contiguous()
    return prune_mask.reshape(rows, columns)
