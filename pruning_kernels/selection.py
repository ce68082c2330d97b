"""Which weights one client prunes: the lowest scores of each comparison group, in exact number."""

import re
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.scores import NotFiniteError

ComparisonGroup = Literal["layer", "row", "column"] | str
"""Weights that compete with each other (FedPrLLM 3.2.1): the whole matrix (``layer``), one output row, one input column, or
``n:m``, each m consecutive weights of a row, of which n are kept."""

LONGEST_PATTERN = 32
"""Beyond it, a group of a pattern is selected like a row."""
_PATTERN = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


def parse_pattern(group: ComparisonGroup) -> tuple[int, int] | None:
    """(n, m) of an n:m pattern that keeps n of m weights, 0 < n < m; None if the text is no such pattern."""
    match = _PATTERN.fullmatch(group)
    if match is None:
        return None
    n, m = int(match[1]), int(match[2])
    return (n, m) if n < m else None


def group_size(shape: tuple[int, int], group: ComparisonGroup) -> int:
    """Number of weights in every comparison group of a matrix.

    Raises
    ------
    ValueError
        The group is unknown, or an n:m pattern does not divide the rows of the matrix.
    """
    rows, columns = shape
    if (pattern := parse_pattern(group)) is not None:
        if columns % pattern[1]:
            raise ValueError(f"pattern {group} does not divide rows of {columns} weights")
        return pattern[1]
    sizes = {"layer": rows * columns, "row": columns, "column": rows}
    if group not in sizes:
        raise ValueError(f"comparison group {group!r} is unknown")
    return sizes[group]


def pruned_per_group(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Number of weights that every comparison group loses: ``int(group size * sparsity)``, or m - n of a pattern n:m."""
    size = group_size(shape, group)
    pattern = parse_pattern(group)
    return int(size * sparsity) if pattern is None else pattern[1] - pattern[0]


def pruned_in_matrix(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Number of weights that a matrix loses when every comparison group loses its exact share."""
    rows, columns = shape
    return rows * columns // group_size(shape, group) * pruned_per_group(shape, sparsity, group)


def select_lowest(scores: Tensor, sparsity: float, group: ComparisonGroup) -> Tensor:
    """Prune the lowest scores of each comparison group (Wanda's selection; the paper's local step 1).

    Parameters
    ----------
    scores : (out_features, in_features), float
    sparsity : share of each group to prune, in [0, 1); an n:m pattern says it by itself
    group : see ``ComparisonGroup``

    Returns
    -------
    Tensor
        bool, True where the weight is pruned. Each group loses exactly ``pruned_per_group`` weights; among equal scores
        the lower index goes first (row-major index in a layer).

    Raises
    ------
    NotFiniteError
        A score is NaN, so that there is no order.
    ValueError
        See ``group_size``.
    """
    if bool(torch.isnan(scores).any()):
        raise NotFiniteError("the scores contain NaN and cannot be compared; check the model's weights")
    rows, columns = scores.shape
    if scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.numel() >= WORTH_COMPILING:
        return _select_compiled(scores, pruned_per_group((rows, columns), sparsity, group), group)
    lines = (scores.T if group == "column" else scores).reshape(-1, group_size((rows, columns), group))
    lowest = torch.sort(lines, dim=1, stable=True).indices[:, : pruned_per_group((rows, columns), sparsity, group)]
    prune_mask = torch.zeros(lines.shape, dtype=torch.bool, device=scores.device).scatter_(1, lowest, True)
    if group == "column":
        return prune_mask.reshape(columns, rows).T.contiguous()
    return prune_mask.reshape(rows, columns)


def _select_compiled(scores: Tensor, quota: int, group: ComparisonGroup) -> Tensor:
    """The same selection by the kernels of ``lowest``."""
    from pruning_kernels import lowest

    prune_mask = np.zeros(tuple(scores.shape), np.bool_)
    bits = scores.contiguous().numpy().view(np.uint32)
    threads = use_threads_of_torch()
    if (pattern := parse_pattern(group)) is not None and pattern[1] <= LONGEST_PATTERN:
        lowest.prune_pattern(bits, pattern[1], quota, prune_mask)
    elif pattern is not None:
        lowest.prune_rows(bits.reshape(-1, pattern[1]), quota, threads, prune_mask.reshape(-1, pattern[1]))
    elif quota:
        kernel = {"layer": lowest.prune_layer, "row": lowest.prune_rows, "column": lowest.prune_columns}[group]
        kernel(bits, quota, threads, prune_mask)
    return torch.from_numpy(prune_mask)


def pruned_by_group(prune_mask: NDArray[np.bool_], group: ComparisonGroup) -> NDArray[np.int64]:
    """How many weights each comparison group of a prune mask, shape (rows, columns), loses: (number of groups,)."""
    rows, columns = prune_mask.shape
    lines = (prune_mask.T if group == "column" else prune_mask).reshape(-1, group_size((rows, columns), group))
    return lines.sum(axis=1, dtype=np.int64)
