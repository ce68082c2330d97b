"""Means of clients' LoRA updates of different ranks, rank by rank over the clients that hold it.

Source: raFLoRA (Wu et al. 2026, "Preventing Rank Collapse in Federated Low-Rank Adaptation with
Client Heterogeneity"). If clients of lower ranks count as zero in the mean of a high rank, that
rank shrinks in every round by the weight of these clients. Here the weights of each rank are those
of its holders. Rank p of client i is the product of column p of B_i and row p of A_i. A rank
without holders keeps the values that it had before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pruning_kernels.lora.factor_means import relative_weights
from pruning_kernels.lora.factors import (
    Factors,
    as_float32,
    as_float64,
    refactorise,
    singular_values,
)


def holder_mean(
    clients: Sequence[Factors], ranks: Sequence[int], weights: Sequence[float], before: Factors
) -> Factors:
    """Return the mean of A and the mean of B, each rank over the clients that hold it.

    Parameters
    ----------
    clients : updates of one shape and scaling
    ranks : rank that each client holds, at most that of its factors
    weights : one number per client, at least 0; a client of weight 0 holds no rank
    before : last global factors, whose rank is that of the result

    Returns
    -------
    Factors
        float32
    """
    # Start from the last factors: ranks without holders keep them.
    b = as_float64(before.b).clone()
    a = as_float64(before.a).clone()
    for rank in range(before.rank):
        holders = _shares_of_rank(ranks, weights, rank)
        if holders:
            b[:, rank] = sum(weight * as_float64(clients[i].b)[:, rank] for i, weight in holders)
            a[rank] = sum(weight * as_float64(clients[i].a)[rank] for i, weight in holders)
    return Factors(as_float32(b), as_float32(a), before.scaling)


def holder_update_mean(
    clients: Sequence[Factors], ranks: Sequence[int], weights: Sequence[float], before: Factors
) -> Factors:
    """Return the best approximation of the mean of updates, each rank over its holders.

    The mean is ``sum_p sum_i w_ip b_ip a_ip``, with the columns b_ip of B_i, the rows a_ip of A_i,
    and weights w_ip of the holders of rank p, which sum to 1. Parameters: as of ``holder_mean``.

    Returns
    -------
    Factors
        float32, of the rank of ``before``, ordered and balanced as in ``factors.refactorise``
    """
    left: list[Tensor] = []
    right: list[Tensor] = []
    for rank in range(before.rank):
        holders = _shares_of_rank(ranks, weights, rank)
        # Without holders the rank keeps its last product.
        if not holders:
            # The scaling goes into the left factors, because ``refactorise`` divides by it.
            left.append(before.scaling * as_float64(before.b)[:, rank])
            right.append(as_float64(before.a)[rank])
        for i, weight in holders:
            left.append(before.scaling * weight * as_float64(clients[i].b)[:, rank])
            right.append(as_float64(clients[i].a)[rank])
    return refactorise(torch.stack(left, dim=1), torch.stack(right), before.rank, before.scaling)


def rank_energy(updates: Sequence[Factors]) -> Tensor:
    """Return the energy of each rank: the squared singular values, summed over matrices.

    Parameters
    ----------
    updates : global updates of all matrices, of one rank

    Returns
    -------
    Tensor
        (rank,), float64, from the largest to the smallest singular value
    """
    energy = torch.zeros(updates[0].rank, dtype=torch.float64)
    for update in updates:
        energy += singular_values(update).to(torch.float64) ** 2
    return energy


def _shares_of_rank(
    ranks: Sequence[int], weights: Sequence[float], rank: int
) -> list[tuple[int, float]]:
    """Return the place and the relative weight of each client that holds a rank."""
    # ``client_rank > rank``: ranks count from 0.
    holders = [
        place
        for place, client_rank in enumerate(ranks)
        if client_rank > rank and weights[place] > 0
    ]
    if not holders:
        return []
    relative = relative_weights([weights[place] for place in holders])
    return list(zip(holders, relative, strict=True))
