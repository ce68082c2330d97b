"""Means of clients' LoRA updates of different ranks, rank by rank over the clients that hold it.

Source: raFLoRA (Wu et al. 2026, "Preventing Rank Collapse in Federated Low-Rank Adaptation with
Client Heterogeneity"). If clients of lower ranks count as zero in the mean of a high rank, that
rank shrinks in every round by the weight of these clients. Here the weights of each rank are those
of its holders. Rank p of client i is the product of column p of B_i and row p of A_i. A rank
without holders keeps the values that it had before. That the share of one client can be limited is
an addition to the paper: what a limit takes from a rank's holders goes to the values before.
"""

import math
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
    clients: Sequence[Factors],
    ranks: Sequence[int],
    weights: Sequence[float],
    before: Factors,
    max_share: float = 1.0,
) -> Factors:
    """Return the mean of A and the mean of B, each rank over the clients that hold it.

    Parameters
    ----------
    clients : updates of one shape and scaling
    ranks : rank that each client holds, at most that of its factors
    weights : one number per client, at least 0; a client of weight 0 holds no rank
    before : last global factors, whose rank is that of the result
    max_share : largest share of one client in a rank; the rest is the share of ``before``

    Returns
    -------
    Factors
        float32
    """
    b, a = torch.zeros_like(as_float64(before.b)), torch.zeros_like(as_float64(before.a))
    for rank in range(before.rank):
        shares, rest = _shares_of_rank(ranks, weights, rank, max_share)
        parts = [(clients[i], share) for i, share in shares] + [(before, rest)] * (rest > 0)
        b[:, rank] = sum(share * as_float64(factors.b)[:, rank] for factors, share in parts)
        a[rank] = sum(share * as_float64(factors.a)[rank] for factors, share in parts)
    return Factors(as_float32(b), as_float32(a), before.scaling)


def holder_update_mean(
    clients: Sequence[Factors],
    ranks: Sequence[int],
    weights: Sequence[float],
    before: Factors,
    max_share: float = 1.0,
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
        shares, rest = _shares_of_rank(ranks, weights, rank, max_share)
        parts = [(clients[i], share) for i, share in shares] + [(before, rest)] * (rest > 0)
        for factors, share in parts:
            # The scaling goes into the left factors, because ``refactorise`` divides by it.
            left.append(before.scaling * share * as_float64(factors.b)[:, rank])
            right.append(as_float64(factors.a)[rank])
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
    ranks: Sequence[int], weights: Sequence[float], rank: int, max_share: float
) -> tuple[list[tuple[int, float]], float]:
    """Return the place and the share of each client that holds a rank, and the remaining share."""
    # ``client_rank > rank``: ranks count from 0.
    holders = [
        place
        for place, client_rank in enumerate(ranks)
        if client_rank > rank and weights[place] > 0
    ]
    if not holders:
        return [], 1.0
    relative = relative_weights([weights[place] for place in holders])
    shares = [min(share, max_share) for share in relative]
    # Exactly 0 if no share was limited; 1 minus the sum of shares could be a rounding error.
    rest = math.fsum(map(float.__sub__, relative, shares))
    return list(zip(holders, shares, strict=True)), rest
