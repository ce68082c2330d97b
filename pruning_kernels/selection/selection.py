"""Local selection of pruned weights: an exact number of lowest scores per comparison group."""

import re
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.selection.scores import NotFiniteError, RiaSums, relative_score

ComparisonGroup = Literal["layer", "row", "column"] | str
"""Weights that compete with each other (FedPrLLM 3.2.1).

- ``layer``: the whole matrix
- ``row``: one output row
- ``column``: one input column
- ``n:m``: m consecutive weights of a row, of which n are kept
"""

_PATTERN = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


def parse_pattern(group: ComparisonGroup) -> tuple[int, int] | None:
    """Return (n, m) of an n:m pattern with 0 < n < m, which keeps n of m weights; else None."""
    match = _PATTERN.fullmatch(group)
    pattern = (int(match[1]), int(match[2])) if match else (0, 0)
    return pattern if pattern[0] < pattern[1] else None


def group_size(shape: tuple[int, int], group: ComparisonGroup) -> int:
    """Return the number of weights in every comparison group of a matrix.

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
    """Return the number of weights that every comparison group loses.

    It is ``int(group size * sparsity)``, or m - n of a pattern n:m.
    """
    size = group_size(shape, group)
    pattern = parse_pattern(group)
    return int(size * sparsity) if pattern is None else pattern[1] - pattern[0]


def pruned_in_matrix(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Return the number of weights that a matrix loses over all comparison groups."""
    rows, columns = shape
    return rows * columns // group_size(shape, group) * pruned_per_group(shape, sparsity, group)


def pruned_by_group(prune_mask: NDArray[np.bool_], group: ComparisonGroup) -> NDArray[np.int64]:
    """Return the number of weights that each comparison group loses: (number of groups,).

    Parameters
    ----------
    prune_mask : (rows, columns)
    """
    rows, columns = prune_mask.shape
    lines = (prune_mask.T if group == "column" else prune_mask).reshape(
        -1, group_size((rows, columns), group)
    )
    return lines.sum(axis=1, dtype=np.int64)


def select_lowest(
    scores: Tensor,
    sparsity: float,
    group: ComparisonGroup,
    factors: Tensor | None = None,
    sums: RiaSums | None = None,
) -> Tensor:
    """Prune the lowest scores of each comparison group (Wanda; FedPrLLM's local step 1).

    Parameters
    ----------
    scores : (out_features, in_features), float; compared as float32
    sparsity : fraction of each group to prune, in [0, 1); an n:m pattern implies its own
    group : see ``ComparisonGroup``
    factors : (in_features,), float32, or None; if given, the scores are ``|scores| * factors``,
        which are not stored for large matrices
    sums : sums of ``scores``, or None; if given, with ``factors``, the scores are those of
        ``relative_score``

    Returns
    -------
    Tensor
        bool, True for pruned weights. Each group loses exactly ``pruned_per_group`` weights. Of
        equal scores the lower index is pruned first (row-major index in a layer).

    Raises
    ------
    NotFiniteError
        A score is NaN, so that there is no order. Scores that are computed here, with ``factors``,
        must not be infinite either; infinite weights lead to them.
    ValueError
        See ``group_size``.
    """
    quota = pruned_per_group((scores.shape[0], scores.shape[1]), sparsity, group)
    compiled = scores.device.type == "cpu" and scores.numel() >= WORTH_COMPILING
    return select_number(scores, quota, group, factors, compiled, sums)


def select_number(
    scores: Tensor,
    quota: int,
    group: ComparisonGroup,
    factors: Tensor | None,
    compiled: bool,
    sums: RiaSums | None = None,
) -> Tensor:
    """Prune the ``quota`` lowest scores of each comparison group.

    ``compiled`` selects the numba kernels; the other arguments are those of ``select_lowest``.
    """
    if compiled and quota:
        prune_mask, unordered = _select_compiled(
            scores.to(torch.float32), quota, group, factors, sums
        )
    else:
        if sums is not None and factors is not None:
            scores = relative_score(scores, sums, factors)
        elif factors is not None:
            scores = scores.to(torch.float32).abs().mul_(factors)
        scores = scores.to(torch.float32)
        rows, columns = scores.shape
        lines = scores.T if group == "column" else scores
        select = _select_sorted if scores.device.type == "cpu" else _select_on_device
        prune_mask = select(lines.reshape(-1, group_size((rows, columns), group)), quota)
        if group == "column":
            prune_mask = prune_mask.reshape(columns, rows).T.contiguous()
        prune_mask = prune_mask.reshape(rows, columns)
        # Scores that are computed here must not be infinite either.
        unordered = bool(
            torch.isnan(scores).any() if factors is None else not torch.isfinite(scores).all()
        )
    if unordered:
        raise NotFiniteError(
            "the scores contain NaN or infinity and cannot be compared; check the model's weights"
        )
    return prune_mask


def _select_sorted(lines: Tensor, quota: int) -> Tensor:
    """Select the ``quota`` lowest scores of each line by a stable sort."""
    lowest = torch.sort(lines, dim=1, stable=True).indices[:, :quota]
    return torch.zeros(lines.shape, dtype=torch.bool).scatter_(1, lowest, True)


def _select_on_device(lines: Tensor, quota: int) -> Tensor:
    """Select as ``_select_sorted``, with ``lowest_on_device``."""
    from pruning_kernels.selection.lowest_on_device import ordered_keys, prune_lowest

    return prune_lowest(ordered_keys(lines), quota)


def _select_compiled(
    scores: Tensor, quota: int, group: ComparisonGroup, factors: Tensor | None, sums: RiaSums | None
) -> tuple[Tensor, bool]:
    """Select with the kernels of ``lowest``; return whether scores cannot be compared, too."""
    from pruning_kernels.selection import lowest

    prune_mask = np.empty(tuple(scores.shape), np.bool_)
    nothing = torch.empty(0)
    given = [
        tensor.detach().contiguous().numpy()
        for tensor in (
            scores,
            nothing if factors is None else factors,
            nothing if sums is None else sums.rows,
            nothing if sums is None else sums.columns,
        )
    ]
    threads = use_threads_of_torch()
    if (pattern := parse_pattern(group)) is not None:
        unordered = lowest.prune_pattern(*given, pattern[1], quota, threads, prune_mask)
    else:
        kernel = {
            "layer": lowest.prune_layer,
            "row": lowest.prune_rows,
            "column": lowest.prune_columns,
        }[group]
        unordered = kernel(*given, quota, threads, prune_mask)
    return torch.from_numpy(prune_mask), bool(unordered)
