"""Other ranks for a LoRA adapter: cut, widened without a change of the update, and pruned by the client itself.

The scaling stays as it is, ``alpha / rank`` is constant: an adapter of rank r has ``alpha = scaling * r``.
"""

import math

import torch
from torch import Generator, Tensor

from pruning_kernels.factors import Factors
from pruning_kernels.scores import NotFiniteError


def shrink(factors: Factors, rank: int) -> Factors:
    """The first columns of B and rows of A (FedSpine section 4.3; HETLoRA's truncation), in memory of their own.

    Of factors ordered by singular value, as ``factors.refactorise`` makes them, this is the best approximation of that rank.
    dtype and scaling stay.

    Raises
    ------
    ValueError
        The rank is below 1 or above that of the factors.
    """
    if not 1 <= rank <= factors.rank:
        raise ValueError(
            f"factors of rank {factors.rank} shrink to a rank from 1 to {factors.rank}, not to"
            f" {rank}"
        )
    b = factors.b.detach()[:, :rank]
    a = factors.a.detach()[:rank]
    return Factors(b.clone(memory_format=torch.contiguous_format), a.clone(), factors.scaling)


def grow(factors: Factors, rank: int, generator: Generator, std: float) -> Factors:
    """Zero columns for B and rows from N(0, std^2) for A (FedSpine section 4.3): a higher rank, and the same update.

    dtype and scaling stay, and ``shrink`` to the former rank gives the former bits. The rows are drawn on the generator's
    device, in float32.

    Raises
    ------
    ValueError
        The rank is below that of the factors, or ``std`` is not a finite number of at least 0.
    """
    extra = rank - factors.rank
    if extra < 0:
        raise ValueError(
            f"factors of rank {factors.rank} do not grow to rank {rank}; shrink makes lower ones"
        )
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std has to be a finite number of at least 0, got {std}")
    b = factors.b.detach()
    a = factors.a.detach()
    drawn = torch.randn((extra, a.shape[1]), generator=generator, device=generator.device) * std
    return Factors(
        torch.cat([b, b.new_zeros(b.shape[0], extra)], dim=1),
        torch.cat([a, drawn.to(a)]),
        factors.scaling,
    )


def tail_norm(factors: Factors, first: int) -> Tensor:
    """``||B[:, first:]|| * ||A[first:, :]||``, Frobenius norms: what HETLoRA's rank self-pruning adds to the loss.

    Cho et al. 2024, rank self-pruning, with ``first = gamma * rank`` and before their factor lambda. The scaling has no part
    in it. It is 0, and no smaller value can follow, where B's tail is zero, as it is before an adapter is first trained.

    Returns
    -------
    Tensor
        float32, one number, with a gradient for factors that have one; where a tail is zero its own gradient is zero.

    Raises
    ------
    ValueError
        ``first`` is below 0 or above the rank.
    """
    if not 0 <= first <= factors.rank:
        raise ValueError(
            f"the tail of factors of rank {factors.rank} starts at 0 to {factors.rank}, not at"
            f" {first}"
        )
    b = factors.b[:, first:]
    a = factors.a[first:]
    norms = [torch.linalg.vector_norm(tail, dtype=torch.float64) for tail in (b, a)]
    return (norms[0] * norms[1]).to(torch.float32)


def kept_rank(rank: int, gamma: float) -> int:
    """Rank that self-pruning leaves, ``floor(gamma * rank)`` but at least 1; the tail starts there.

    The paper does not say how to round. ``0.58 * 50`` counts as 29, although in binary it is a little less.

    Raises
    ------
    ValueError
        The rank is below 1, or gamma does not lie between 0 and 1, 0 excluded.
    """
    if rank < 1:
        raise ValueError(f"rank has to be at least 1, got {rank}")
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma has to lie above 0 and not above 1, got {gamma}")
    return max(1, math.floor(gamma * rank + 1e-9))


def self_prune_rank(rank: int, gamma: float, before: float, after: float) -> int:
    """Rank that a client goes on with after its local training: HETLoRA's rank self-pruning (Cho et al. 2024).

    Parameters
    ----------
    rank : of the factors that were trained
    gamma : share of the ranks that pruning leaves, see ``kept_rank``
    before, after : ``tail_norm`` of the factors from ``kept_rank`` on, or its sum over several matrices, before and after local
        training

    Returns
    -------
    int
        ``kept_rank`` where the tail's norm has shrunk, otherwise the rank of the factors; ``shrink`` applies it.

    Raises
    ------
    ValueError
        gamma is out of range, or a norm is negative.
    NotFiniteError
        A norm is NaN or infinite, as where the tail holds such a number.
    """
    if not (math.isfinite(before) and math.isfinite(after)):
        raise NotFiniteError(
            "the factors of an update hold NaN or infinity; lower the learning rate"
        )
    if before < 0 or after < 0:
        raise ValueError(
            f"norms have to be at least 0, got {before} before training and {after} after it"
        )
    kept = kept_rank(rank, gamma)
    return kept if after < before else rank
