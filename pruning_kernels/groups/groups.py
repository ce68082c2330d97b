"""Scores of prunable groups, and the choice of groups or blocks that a structured cut removes.

The weights of a prunable group, an attention group or an FFN channel, are rows of some matrices and
columns of others. The caller defines scores, costs and which groups compete.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def coupled_sums(scores: Tensor, side: int, size: int, order: Tensor | None = None) -> Tensor:
    """Return the sum of a matrix's scores over the weights of each group: (groups,), float64.

    Parameters
    ----------
    scores : (rows, columns), any floating dtype
    side : 0 if a group consists of rows, 1 if it consists of columns
    size : number of rows or columns of a group, which are consecutive
    order : rows or columns group by group, int64, if those of a group are not consecutive
    """
    lines = scores.sum(dim=1 - side, dtype=torch.float64)
    lines = lines if order is None else lines[order]
    # (groups, size)
    return lines.view(-1, size).sum(dim=1)


def lowest_groups(
    scores: Tensor, costs: Tensor, pools: Tensor, target: int, gone: Tensor | None = None
) -> Tensor:
    """Choose the groups with the lowest scores until their costs reach a target: (groups,), bool.

    The costs exceed the target by less than one group. Of equal scores the lower index is cut
    first. In each pool the group with the highest score stays, whatever the target; of equal ones
    that with the highest index. Groups that were cut before stay cut and count, so choices for a
    growing target grow.

    Parameters
    ----------
    scores : (groups,), floating, not NaN
    costs : (groups,), int64, positive: number of parameters of each group
    pools : (groups,), int64: a pool has the groups of one kind in one block
    target : number of parameters to cut
    gone : (groups,), bool: groups that were cut before; None: none

    Raises
    ------
    ValueError
        All groups but one of each pool cost less than the target.
    """
    cut = torch.zeros_like(scores, dtype=torch.bool) if gone is None else gone.clone()
    # Groups that are gone cannot be the best of their pool.
    stays = _best_of_each_pool(scores.masked_fill(cut, -torch.inf), pools)
    candidates = (~cut & ~stays).nonzero().squeeze(1)
    order = candidates[torch.sort(scores[candidates], stable=True).indices]
    spent = int(costs[cut].sum())
    ordered_costs = costs[order]
    # A group is cut if the groups before it do not reach the target: the last one may exceed it.
    before = spent + torch.cumsum(ordered_costs, 0) - ordered_costs
    cut[order[before < target]] = True
    if (reached := int(costs[cut].sum())) < target:
        raise _too_few(target, reached)
    return cut


def _too_few(target: int, reached: int) -> ValueError:
    return ValueError(
        f"{target} parameters are to be cut, and all groups but one of each kind and block have"
        f" {reached}"
    )


def _best_of_each_pool(scores: Tensor, pools: Tensor) -> Tensor:
    """Return the mask, (groups,), of the group with the highest score in each pool.

    Of equal scores it is the group with the highest index.
    """
    # Compare places in the stable order instead of scores, so that ties have one winner.
    order = torch.sort(scores, stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=scores.device)
    highest = places.new_zeros(int(pools.max()) + 1).scatter_reduce(0, pools, places, "amax")
    return places == highest[pools]


def searched(scores: Tensor, costs: Tensor, pools: Tensor, kinds: Tensor, target: int) -> Tensor:
    """Choose groups of two kinds with the lowest sum of scores whose costs reach a target.

    This is Mask Tuning's search by Fisher information (Kwon et al. 2022). It considers choices that
    take the lowest scores of each kind, which are optimal if groups of a kind cost the same: for
    every number of groups of one kind, the fewest of the other. In each pool the group with the
    highest score stays. The result is (groups,), bool: True for groups that are cut.

    Parameters
    ----------
    scores : (groups,), floating, at least 0
    costs, pools : (groups,), int64, see ``lowest_groups``
    kinds : (groups,), int64: 0 or 1
    target : number of parameters to cut

    Raises
    ------
    ValueError
        All groups but one of each pool cost less than the target.
    """
    # The best group of each pool is not up for choice, so that no block loses all groups of a kind.
    free = ~_best_of_each_pool(scores, pools)
    orders = []
    spent = []
    lost = []
    for kind in (0, 1):
        candidates = (free & (kinds == kind)).nonzero().squeeze(1)
        order = candidates[torch.sort(scores[candidates], stable=True).indices]
        orders.append(order)
        # Entry n is the sum over the n lowest groups of this kind, n from 0.
        spent.append(torch.cat([costs.new_zeros(1), costs[order].cumsum(0)]))
        lost.append(
            torch.cat([scores.new_zeros(1, dtype=torch.float64), scores[order].double().cumsum(0)])
        )
    # Smallest number of groups of the second kind for each number of the first.
    rest = torch.searchsorted(spent[1], target - spent[0])
    possible = rest < len(spent[1])
    if not possible.any():
        raise _too_few(target, int(spent[0][-1] + spent[1][-1]))
    # Infeasible combinations get an infinite loss, so ``argmin`` never takes them.
    total = torch.where(possible, lost[0] + lost[1][rest.clamp_max(len(spent[1]) - 1)], torch.inf)
    first = int(total.argmin())
    cut = torch.zeros_like(free)
    cut[orders[0][:first]] = True
    cut[orders[1][: int(rest[first])]] = True
    return cut


def cheapest_groups(costs: Sequence[float], span: int, number: int) -> list[int]:
    """Return the starts, ascending, of non-overlapping groups with the smallest sum of costs.

    They are found by dynamic programming. Of several optimal choices the one whose last groups
    begin earliest is returned.

    Parameters
    ----------
    costs : cost of the group that begins at 0, 1, ...; a group can end after the last of these
    span : number of elements of a group, at least 1
    number : number of groups

    Raises
    ------
    ValueError
        There is not enough room for the groups.
    """
    if number and len(costs) < (number - 1) * span + 1:
        raise ValueError(
            f"{number} groups of {span} need {(number - 1) * span + 1} starts or more, there are"
            f" {len(costs)}"
        )
    infinite = float("inf")
    size = len(costs)
    # best[j][e]: smallest sum of j groups whose starts are below e
    best = [[0.0] * (size + 1)]
    for group in range(1, number + 1):
        row = [infinite] * (size + 1)
        for end in range(1, size + 1):
            before = best[group - 1][max(0, end - span)]
            row[end] = min(row[end - 1], before + costs[end - 1])
        best.append(row)
    # Walk back: strict improvement at ``end`` means that a group begins at ``end - 1``.
    starts = list[int]()
    end = size
    for group in range(number, 0, -1):
        while best[group][end - 1] == best[group][end]:
            end -= 1
        starts.append(end - 1)
        end = max(0, end - span)
    return starts[::-1]
