"""Units that are cut whole: what they are worth, and which of them go so that a model loses a share of its parameters.

A unit is an attention group or a feed-forward channel; its weights lie in rows of some matrices and columns of others. Here are
sums over them, and the choice. What a unit is worth and costs, and which units compete, is the caller's.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def coupled_sums(scores: Tensor, side: int, size: int) -> Tensor:
    """Sum of a matrix's scores over the weights of each unit.

    Parameters
    ----------
    scores : (rows, columns), any floating dtype
    side : 0 where a unit is rows, 1 where it is columns
    size : rows or columns of one unit, next to each other

    Returns
    -------
    (units,), float64
    """
    lines = scores.sum(dim=1 - side, dtype=torch.float64)
    return lines.view(-1, size).sum(dim=1)


def lowest_units(
    scores: Tensor, costs: Tensor, pools: Tensor, target: int, gone: Tensor | None = None
) -> Tensor:
    """Choose units to cut, those of low score first, until what they cost reaches a target: less than one unit beyond it.

    Of equal scores the lower index goes first. In each pool the unit of the highest score stays, whatever the target; of equal
    ones that of the highest index. What is gone already stays gone and counts, so that choices of a growing target grow.

    Parameters
    ----------
    scores : (units,), floating, not NaN
    costs : (units,), int64, positive: parameters of each unit
    pools : (units,), int64: units of one pool are those of one kind in one block
    target : parameters to cut
    gone : (units,), bool: units that were cut before; None: none

    Returns
    -------
    (units,), bool: True for units that are cut

    Raises
    ------
    ValueError
        A score is NaN, or all units but one of each pool cost less than the target.
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
            f"{target} parameters are to be cut, and all units but one of each kind and block have"
            f" {reached}"
        )
    return cut


def _best_of_each_pool(scores: Tensor, pools: Tensor) -> Tensor:
    """(units,), bool: in each pool the unit of the highest score, of equal ones that of the highest index."""
    order = torch.sort(scores, stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=scores.device)
    highest = places.new_zeros(int(pools.max()) + 1).scatter_reduce(0, pools, places, "amax")
    return places == highest[pools]


def share_of(total: int, share: float) -> int:
    """Parameters that a share of a total is, rounded up; what a float adds to a whole number is none of it."""
    return math.ceil(total * share * (1 - 1e-12))


def within_each(
    scores: Tensor, costs: Tensor, pools: Tensor, competing: Tensor, totals: Sequence[int], share: float,
    gone: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``lowest_units`` among those that compete with each other, each time for a share of what they belong to.

    Parameters
    ----------
    competing : (units,), int64: 0 for all, or the number of a block, or of a kind of unit in a block
    totals : by that number, the parameters of which a share is to be cut
    """
    cut = torch.zeros_like(scores, dtype=torch.bool)
    for number, total in enumerate(totals):
        own = (competing == number).nonzero().squeeze(1)
        before = None if gone is None else gone[own]
        cut[own] = lowest_units(scores[own], costs[own], pools[own], share_of(total, share), before)
    return cut


def searched(scores: Tensor, costs: Tensor, pools: Tensor, kinds: Tensor, target: int) -> Tensor:
    """Choose units of two kinds so that what they cost reaches a target and their scores together are lowest.

    Mask Tuning's search by Fisher information (Kwon et al. 2022), among choices that take the lowest of each kind, which are
    the best where units of a kind cost alike: for every number of the one, the fewest of the other. In each pool the unit of
    the highest score stays.

    Parameters
    ----------
    scores : (units,), floating, not negative
    costs, pools : (units,), int64, see ``lowest_units``
    kinds : (units,), int64: 0 or 1
    target : parameters to cut

    Returns
    -------
    (units,), bool: True for units that are cut

    Raises
    ------
    ValueError
        A score is NaN or negative, or all units but one of each pool cost less than the target.
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
    # The fewest of the second kind for each number of the first.
    rest = torch.searchsorted(spent[1], target - spent[0])
    possible = rest < len(spent[1])
    if not possible.any():
        reached = int(spent[0][-1] + spent[1][-1])
        raise ValueError(
            f"{target} parameters are to be cut, and all units but one of each kind and block have"
            f" {reached}"
        )
    total = torch.where(possible, lost[0] + lost[1][rest.clamp_max(len(spent[1]) - 1)], torch.inf)
    first = int(total.argmin())
    cut = torch.zeros_like(free)
    cut[orders[0][:first]] = True
    cut[orders[1][: int(rest[first])]] = True
    return cut
