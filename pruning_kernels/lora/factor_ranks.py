"""Changes of a LoRA adapter's rank: truncation, growth and self-pruning.

The scaling ``alpha / rank`` is constant: an adapter of rank r has ``alpha = scaling * r``.
"""

import math

import torch
from torch import Generator, Tensor

from pruning_kernels.lora.factors import Factors
from pruning_kernels.selection.scores import NotFiniteError


def shrink(factors: Factors, rank: int) -> Factors:
    """Return the first ``rank`` columns of B and rows of A, as copies.

    Sources: FedSpine section 4.3; HETLoRA's truncation. If the factors are ordered by singular
    value, as from ``factors.refactorise``, this is the best approximation of that rank. dtype and
    scaling do not change.

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
    """Return factors of a higher rank with the same update (FedSpine section 4.3).

    B gets zero columns and A rows from N(0, std^2). dtype and scaling do not change, and ``shrink``
    to the former rank returns the former bits. The rows are drawn on the generator's device, in
    float32.

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
    """Return ``||B[:, first:]|| * ||A[first:, :]||``, the penalty of HETLoRA's rank self-pruning.

    Source: Cho et al. 2024, with ``first = gamma * rank`` and without their factor lambda. The
    norms are Frobenius norms, and the scaling is not included. The value is 0 if B's tail is zero,
    as it is before an adapter is first trained. A later value cannot be smaller.

    Returns
    -------
    Tensor
        float32, one number, with a gradient for factors that have one; the gradient of a tail that
        is zero is zero.

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
    """Return the rank that self-pruning leaves, ``floor(gamma * rank)`` but at least 1.

    The tail starts at this rank. The paper does not define the rounding. ``0.58 * 50`` counts as
    29, although its float value is slightly lower.

    Raises
    ------
    ValueError
        The rank is below 1, or gamma is not above 0 and at most 1.
    """
    if rank < 1:
        raise ValueError(f"rank has to be at least 1, got {rank}")
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma has to lie above 0 and not above 1, got {gamma}")
    # The small number corrects products such as 0.58 * 50, which is slightly below 29.
    return max(1, math.floor(gamma * rank + 1e-9))


def self_prune_rank(rank: int, gamma: float, before: float, after: float) -> int:
    """Return a client's rank after local training, by HETLoRA's rank self-pruning.

    Source: Cho et al. 2024.

    Parameters
    ----------
    rank : rank of the trained factors
    gamma : fraction of the ranks that pruning leaves, see ``kept_rank``
    before, after : ``tail_norm`` of the factors from ``kept_rank`` on, or its sum over several
        matrices, before and after local training

    Returns
    -------
    int
        ``kept_rank`` if the tail's norm has shrunk, otherwise the rank of the factors; ``shrink``
        applies it.

    Raises
    ------
    ValueError
        gamma is out of range, or a norm is negative.
    NotFiniteError
        A norm is NaN or infinite, for instance because the tail has such a number.
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
