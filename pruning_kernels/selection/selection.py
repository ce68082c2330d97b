"""Local selection of pruned weights: an exact number of lowest scores per comparison group."""

import numpy as np
import torch
from torch import Tensor

from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    group_size,
    parse_pattern,
    pruned_per_group,
)
from pruning_kernels.selection.scores import NotFiniteError, RiaSums, relative_score


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
    factors : (in_features,), float32, or None
        If given, the scores are ``|scores| * factors``. For large matrices they are not stored.
    sums : sums of ``scores``, or None; needs ``factors``
        If given, the scores are those of ``relative_score``. For large matrices they are not
        stored.

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
        size = group_size((scores.shape[0], scores.shape[1]), group)
        select = _select_sorted if scores.device.type == "cpu" else _select_on_device
        prune_mask = select(scores, size, quota, group)
        unordered = _unordered(scores, finite=factors is not None)
    if unordered:
        raise NotFiniteError(
            "the scores contain NaN or infinity and cannot be compared; check the model's weights"
        )
    return prune_mask


def _unordered(scores: Tensor, finite: bool) -> bool:
    """Return whether a score is NaN, or with ``finite`` NaN or infinite."""
    return not bool(torch.isfinite(scores).all()) if finite else bool(torch.isnan(scores).any())


def _select_sorted(scores: Tensor, size: int, quota: int, group: ComparisonGroup) -> Tensor:
    """Select by a stable sort."""
    rows, columns = scores.shape
    lines = (scores.T if group == "column" else scores).reshape(-1, size)
    lowest = torch.sort(lines, dim=1, stable=True).indices[:, :quota]
    prune_mask = torch.zeros(lines.shape, dtype=torch.bool).scatter_(1, lowest, True)
    return (
        prune_mask.reshape(columns, rows).T.contiguous()
        if group == "column"
        else prune_mask.reshape(rows, columns)
    )


def _select_on_device(scores: Tensor, size: int, quota: int, group: ComparisonGroup) -> Tensor:
    """Select with ``lowest_on_device``, with the result of ``_select_sorted``."""
    from pruning_kernels.selection.lowest_on_device import ordered_keys, prune_lowest

    rows, columns = scores.shape
    lines = (scores.T if group == "column" else scores).reshape(-1, size)
    prune_mask = prune_lowest(ordered_keys(lines), quota)
    return (
        prune_mask.reshape(columns, rows).T.contiguous()
        if group == "column"
        else prune_mask.reshape(rows, columns)
    )


def _select_compiled(
    scores: Tensor, quota: int, group: ComparisonGroup, factors: Tensor | None, sums: RiaSums | None
) -> tuple[Tensor, bool]:
    """Select with the kernels of ``lowest``; return whether scores cannot be compared, too."""
    from pruning_kernels.selection import lowest

    prune_mask = np.empty(tuple(scores.shape), np.bool_)
    given = scores.detach().contiguous().numpy()
    nothing = np.empty(0, np.float32)
    by = nothing if factors is None else factors.contiguous().numpy()
    of = (
        (nothing, nothing)
        if sums is None
        else (sums.rows.contiguous().numpy(), sums.columns.contiguous().numpy())
    )
    threads = use_threads_of_torch()
    if (pattern := parse_pattern(group)) is not None:
        unordered = lowest.prune_pattern(given, by, *of, pattern[1], quota, threads, prune_mask)
    else:
        kernel = {
            "layer": lowest.prune_layer,
            "row": lowest.prune_rows,
            "column": lowest.prune_columns,
        }[group]
        unordered = kernel(given, by, *of, quota, threads, prune_mask)
    return torch.from_numpy(prune_mask), bool(unordered)
