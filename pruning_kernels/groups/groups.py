"""Scores of prunable groups, and the choice of groups that a structured cut removes.

The weights of a prunable group, an attention group or an FFN channel, are rows of some matrices and
columns of others. This module sums scores over them and chooses. The caller defines scores, costs
and which groups compete.
"""

import torch
from torch import Tensor


def coupled_sums(scores: Tensor, side: int, size: int) -> Tensor:
    """Return the sum of a matrix's scores over the weights of each group.

    Parameters
    ----------
    scores : (rows, columns), any floating dtype
    side : 0 if a group consists of rows, 1 if it consists of columns
    size : number of consecutive rows or columns of a group

    Returns
    -------
    Tensor
        (groups,), float64
    """
    lines = scores.sum(dim=1 - side, dtype=torch.float64)
    return lines.view(-1, size).sum(dim=1)


def lowest_groups(
    scores: Tensor, costs: Tensor, pools: Tensor, target: int, gone: Tensor | None = None
) -> Tensor:
    """Choose the groups with the lowest scores until their costs reach a target.

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

    Returns
    -------
    Tensor
        (groups,), bool: True for groups that are cut

    Raises
    ------
    ValueError
        A score is NaN, or all groups but one of each pool cost less than the target.
    """
    if torch.isnan(scores).any():
        raise ValueError("a score is NaN")
    cut = torch.zeros_like(scores, dtype=torch.bool) if gone is None else gone.clone()
    stays = _best_of_each_pool(scores.masked_fill(cut, -torch.inf), pools)
    candidates = (~cut & ~stays).nonzero().squeeze(1)
    order = candidates[torch.sort(scores[candidates], stable=True).indices]
    spent = int(costs[cut].sum())
    own = costs[order]
    before = spent + torch.cumsum(own, 0) - own
    cut[order[before < target]] = True
    if (reached := int(costs[cut].sum())) < target:
        raise ValueError(
            f"{target} parameters are to be cut, and all groups but one of each kind and block have"
            f" {reached}"
        )
    return cut


def _best_of_each_pool(scores: Tensor, pools: Tensor) -> Tensor:
    """Return the mask, (groups,), of the group with the highest score in each pool.

    Of equal scores it is the group with the highest index.
    """
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
    highest score stays.

    Parameters
    ----------
    scores : (groups,), floating, not negative
    costs, pools : (groups,), int64, see ``lowest_groups``
    kinds : (groups,), int64: 0 or 1
    target : number of parameters to cut

    Returns
    -------
    Tensor
        (groups,), bool: True for groups that are cut

    Raises
    ------
    ValueError
        A score is NaN or negative, or all groups but one of each pool cost less than the target.
    """
    if not (scores >= 0).all():
        raise ValueError("a score is NaN or negative")
    free = ~_best_of_each_pool(scores, pools)
    orders = []
    spent = []
    lost = []
    for kind in (0, 1):
        own = (free & (kinds == kind)).nonzero().squeeze(1)
        order = own[torch.sort(scores[own], stable=True).indices]
        orders.append(order)
        spent.append(torch.cat([costs.new_zeros(1), costs[order].cumsum(0)]))
        lost.append(
            torch.cat([scores.new_zeros(1, dtype=torch.float64), scores[order].double().cumsum(0)])
        )
    # Smallest number of groups of the second kind for each number of the first.
    rest = torch.searchsorted(spent[1], target - spent[0])
    possible = rest < len(spent[1])
    if not possible.any():
        reached = int(spent[0][-1] + spent[1][-1])
        raise ValueError(
            f"{target} parameters are to be cut, and all groups but one of each kind and block have"
            f" {reached}"
        )
    total = torch.where(possible, lost[0] + lost[1][rest.clamp_max(len(spent[1]) - 1)], torch.inf)
    first = int(total.argmin())
    cut = torch.zeros_like(free)
    cut[orders[0][:first]] = True
    cut[orders[1][: int(rest[first])]] = True
    return cut
