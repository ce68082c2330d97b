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


def select_lowest(scores: Tensor, sparsity: float, group: ComparisonGroup, factors: Tensor | None = None) -> Tensor:
    """Prune the lowest scores of each comparison group (Wanda's selection; the paper's local step 1).

    Parameters
    ----------
    scores : (out_features, in_features), float; compared as float32
    sparsity : share of each group to prune, in [0, 1); an n:m pattern says it by itself
    group : see ``ComparisonGroup``
    factors : (in_features,), float32, or None
        The scores are ``|scores| * factors``; large matrices are then selected from without writing them down.

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
    quota = pruned_per_group((scores.shape[0], scores.shape[1]), sparsity, group)
    return select_number(scores, quota, group, factors, scores.device.type == "cpu" and scores.numel() >= WORTH_COMPILING)


def select_number(scores: Tensor, quota: int, group: ComparisonGroup, factors: Tensor | None, compiled: bool) -> Tensor:
    """Prune the ``quota`` lowest scores of each comparison group, by compiled kernels or by a sort: see ``select_lowest``."""
    if compiled and quota:
        prune_mask, nan = _select_compiled(scores.to(torch.float32), quota, group, factors)
    else:
        scores = scores.to(torch.float32)
        if factors is not None:
            scores = scores.abs().mul_(factors)
        size = group_size((scores.shape[0], scores.shape[1]), group)
        select = _select_sorted if scores.device.type == "cpu" else _select_on_device
        prune_mask, nan = select(scores, size, quota, group), bool(torch.isnan(scores).any())
    if nan:
        raise NotFiniteError("the scores contain NaN and cannot be compared; check the model's weights")
    return prune_mask


def _select_sorted(scores: Tensor, size: int, quota: int, group: ComparisonGroup) -> Tensor:
    """The selection by a stable sort."""
    rows, columns = scores.shape
    lines = (scores.T if group == "column" else scores).reshape(-1, size)
    lowest = torch.sort(lines, dim=1, stable=True).indices[:, :quota]
    prune_mask = torch.zeros(lines.shape, dtype=torch.bool).scatter_(1, lowest, True)
    return prune_mask.reshape(columns, rows).T.contiguous() if group == "column" else prune_mask.reshape(rows, columns)


def _select_on_device(scores: Tensor, size: int, quota: int, group: ComparisonGroup) -> Tensor:
    """The same selection by ``lowest_on_device``."""
    from pruning_kernels.lowest_on_device import ordered_keys, prune_lowest

    rows, columns = scores.shape
    lines = (scores.T if group == "column" else scores).reshape(-1, size)
    prune_mask = prune_lowest(ordered_keys(lines), quota)
    return prune_mask.reshape(columns, rows).T.contiguous() if group == "column" else prune_mask.reshape(rows, columns)


def _select_compiled(scores: Tensor, quota: int, group: ComparisonGroup, factors: Tensor | None) -> tuple[Tensor, bool]:
    """The same selection by the kernels of ``lowest``, and whether a score is NaN."""
    from pruning_kernels import lowest

    prune_mask = np.empty(tuple(scores.shape), np.bool_)
    given = scores.detach().contiguous().numpy()
    by = np.empty(0, np.float32) if factors is None else factors.contiguous().numpy()
    threads = use_threads_of_torch()
    if (pattern := parse_pattern(group)) is not None:
        nan = lowest.prune_pattern(given, by, pattern[1], quota, threads, prune_mask)
    else:
        kernel = {"layer": lowest.prune_layer, "row": lowest.prune_rows, "column": lowest.prune_columns}[group]
        nan = kernel(given, by, quota, threads, prune_mask)
    return torch.from_numpy(prune_mask), bool(nan)


def pruned_by_group(prune_mask: NDArray[np.bool_], group: ComparisonGroup) -> NDArray[np.int64]:
    """How many weights each comparison group of a prune mask, shape (rows, columns), loses: (number of groups,)."""
    rows, columns = prune_mask.shape
    lines = (prune_mask.T if group == "column" else prune_mask).reshape(-1, group_size((rows, columns), group))
    return lines.sum(axis=1, dtype=np.int64)
