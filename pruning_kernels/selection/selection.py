"""Local selection of pruned weights: an exact number of lowest scores per comparison group."""

import numpy as np
import torch
from torch import Tensor

from pruning_kernels.compiler import WORTH_COMPILING, use_threads_of_torch
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
    # The quota is exact, so that all clients and the server agree on the number of pruned weights.
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
        # A comparison group becomes one line, contiguous.
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
    """Select as ``_select_sorted``, with ``lowest_scores_on_device``."""
    from pruning_kernels.selection.lowest_scores_on_device import ordered_keys, prune_lowest

    return prune_lowest(ordered_keys(lines), quota)


def _select_compiled(
    scores: Tensor, quota: int, group: ComparisonGroup, factors: Tensor | None, sums: RiaSums | None
) -> tuple[Tensor, bool]:
    """Select with ``lowest_scores``; return whether scores cannot be compared, too."""
    from pruning_kernels.selection import lowest_scores

    prune_mask = np.empty(tuple(scores.shape), np.bool_)
    # numba needs arrays of one type; an empty one stands for None.
    nothing = torch.empty(0)
    arrays = [
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
        unordered = lowest_scores.prune_pattern(*arrays, pattern[1], quota, threads, prune_mask)
    else:
        kernel = {
            "layer": lowest_scores.prune_layer,
            "row": lowest_scores.prune_rows,
            "column": lowest_scores.prune_columns,
        }[group]
        unordered = kernel(*arrays, quota, threads, prune_mask)
    return torch.from_numpy(prune_mask), bool(unordered)
