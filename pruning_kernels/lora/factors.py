"""Update that a LoRA adapter adds to a matrix, represented by its factors (Hu et al. 2021).

As in peft, A is ``(rank, in_features)``, B ``(out_features, rank)``, and the update ``scaling * B @
A``. Functions of the update are computed from QR decompositions of the thin factors. The dense
matrix is formed only if there is no other way. Computations use float64 and are rounded once, to
float32. The same inputs in the same order give the same bits for one CPU type, number of threads
and version of torch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning_kernels.selection.scores import NotFiniteError


@dataclass(frozen=True, eq=False)
class Factors:
    """LoRA adapter of one matrix."""

    b: Tensor
    """(out_features, rank), any float dtype."""
    a: Tensor
    """(rank, in_features), any float dtype, on the device of ``b``."""
    scaling: float
    """``alpha / rank`` of LoRA."""

    @property
    def rank(self) -> int:
        """Number of columns of B and rows of A; the rank of the update can be lower."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the update."""
        return self.b.shape[0], self.a.shape[1]


def norm(factors: Factors) -> float:
    """Return the Frobenius norm of the update, HetLoRA's weight of a client (Cho et al. 2024).

    It is ``scaling * sqrt(trace(B^T B A A^T))``. If the columns of B cancel each other, the trace
    suffers from cancellation, and results below 1e-8 of ``||B|| ||A||`` are rounding errors.

    Raises
    ------
    NotFiniteError
        A factor has NaN or infinity, or numbers whose squares exceed float64.
    """
    # Only rank x rank matrices: trace of B^T B times A A^T.
    b = as_float64(factors.b)
    a = as_float64(factors.a)
    trace = _require_finite(((b.T @ b) * (a @ a.T)).sum())
    # Rounding can make a trace near 0 negative.
    return factors.scaling * math.sqrt(max(0.0, float(trace)))


def singular_values(factors: Factors) -> Tensor:
    """Return the singular values of the update in descending order: (rank,), float32.

    They are lambda in FedSpine section 4.3. If the rank exceeds the number of rows or columns of
    the update, the last values are zero.

    Raises
    ------
    NotFiniteError
        A factor, or a singular value in float32, is NaN or infinite.
    """
    # With B = Q_b R_b and A^T = Q_a R_a, the values are those of the small matrix R_b R_a^T.
    b = torch.linalg.qr(as_float64(factors.b), "r").R
    a = torch.linalg.qr(as_float64(factors.a).T, "r").R
    singular = torch.linalg.svdvals(b @ a.T) * factors.scaling
    return as_float32(torch.cat([singular, singular.new_zeros(factors.rank - len(singular))]))


def refactorise(left: Tensor, right: Tensor, rank: int, scaling: float) -> Factors:
    """Return factors of the best approximation of ``left @ right`` (Eckart & Young 1936).

    Parameters
    ----------
    left : (out_features, k), any float dtype
    right : (k, in_features), on the device of ``left``
    rank, scaling : rank and scaling of the result; the update does not depend on the scaling

    Returns
    -------
    Factors
        float32. With ``left = Q_p R_p``, ``right^T = Q_q R_q`` and ``R_p R_q^T = U S V^T``, a
        matrix of k by k, ``B = Q_p U sqrt(S / scaling)`` and ``A = sqrt(S / scaling) V^T Q_q^T``.
        Singular values are in descending order, so the first r columns of B and rows of A are the
        best approximation of rank r. In each column of B the first entry with the largest magnitude
        is positive, so the factors are unique if all singular values differ. If the product has a
        lower rank, the last columns of B and rows of A are zero.

    Raises
    ------
    NotFiniteError
        An input, or a factor in float32, has NaN or infinity.
    """
    left = as_float64(left)
    right = as_float64(right)
    sides = left.shape[0], right.shape[1]
    u, values, v = _decompose(left, right, min(rank, *sides))
    # Singular values that float64 cannot tell from zero count as zero.
    rounding = left.norm() * right.norm() * max(sides) * torch.finfo(torch.float64).eps
    own_rank = int((values > rounding).sum())
    u = u[:, :own_rank]
    values = values[:own_rank]
    v = v[:, :own_rank]
    # Singular vectors are unique up to sign; fix it by the largest entry.
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    roots = (values / scaling).sqrt() * signs
    b = u.new_zeros(sides[0], rank)
    a = u.new_zeros(rank, sides[1])
    # Both factors get the root of the singular values, so neither is much larger than the other.
    b[:, :own_rank] = u * roots
    a[:own_rank] = (v * roots).T
    return Factors(as_float32(b), as_float32(a), scaling)


def as_float64(numbers: Tensor) -> Tensor:
    """Return the numbers in float64 without gradient; raise ``NotFiniteError`` unless finite."""
    return _require_finite(numbers.detach().to(torch.float64))


def as_float32(numbers: Tensor) -> Tensor:
    """Return the numbers in float32; raise ``NotFiniteError`` if one exceeds its range."""
    return _require_finite(numbers.to(torch.float32))


def _require_finite(numbers: Tensor) -> Tensor:
    if not bool(torch.isfinite(numbers).all()):
        raise NotFiniteError(
            "the factors of an update hold NaN or infinity, or lead to them; lower the learning"
            " rate"
        )
    return numbers


def _decompose(left: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (out_features, count), the singular values and V (in_features, count).

    If the inner dimension is smaller than both sides, the dense product is not formed.
    """
    # The thin path saves nothing if the inner dimension is not the smallest.
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, values, vh = torch.linalg.svd(left @ right, full_matrices=False)
        return u[:, :count], values[:count], vh[:count].T
    # Householder reflections instead of Q: Q is applied to a few vectors and never formed.
    reflections_p = torch.geqrf(left)
    reflections_q = torch.geqrf(right.T)
    k = left.shape[1]
    u, values, vh = torch.linalg.svd(reflections_p.a[:k].triu() @ reflections_q.a[:k].triu().T)
    return (
        _rotate(reflections_p, u[:, :count]),
        values[:count],
        _rotate(reflections_q, vh[:count].T),
    )


def _rotate(reflections: tuple[Tensor, Tensor], vectors: Tensor) -> Tensor:
    """Return Q times the vectors without forming Q, whose reflections ``torch.geqrf`` returned."""
    below = vectors.new_zeros(reflections[0].shape[0] - vectors.shape[0], vectors.shape[1])
    return torch.ormqr(*reflections, torch.cat([vectors, below]))


def tail_norm(factors: Factors, first: int) -> Tensor:
    """Return ``||B[:, first:]|| * ||A[first:, :]||``, HETLoRA's penalty (Cho et al. 2024): float32.

    ``first`` is the paper's ``gamma * rank``. Its factor lambda and the scaling are left out, and
    the norms are Frobenius norms. The value, and its gradient if the factors have one, are 0 if B's
    tail is zero, as it is before an adapter is first trained.
    """
    b = torch.linalg.vector_norm(factors.b[:, first:], dtype=torch.float64)
    a = torch.linalg.vector_norm(factors.a[first:], dtype=torch.float64)
    return (b * a).to(torch.float32)


def kept_rank(rank: int, gamma: float) -> int:
    """Return the rank that HETLoRA's self-pruning leaves, ``floor(gamma * rank)`` but at least 1.

    The tail starts at this rank. The paper does not define the rounding. ``0.58 * 50`` counts as
    29, although its float value is slightly lower.
    """
    # The small number corrects products such as 0.58 * 50, which is slightly below 29.
    return max(1, math.floor(gamma * rank + 1e-9))


def self_prune_rank(rank: int, gamma: float, before: float, after: float) -> int:
    """Return a client's rank after local training: ``kept_rank`` if the tail has shrunk.

    Parameters
    ----------
    rank : rank of the trained factors
    gamma : fraction of the ranks that pruning leaves
    before, after : ``tail_norm`` of the factors from ``kept_rank`` on, or its sum over several
        matrices, before and after local training

    Raises
    ------
    NotFiniteError
        A norm is NaN or infinite, for instance because the tail has such a number.
    """
    # A comparison with NaN is False, which would look like a tail that has not shrunk.
    if not (math.isfinite(before) and math.isfinite(after)):
        raise NotFiniteError(
            "the factors of an update hold NaN or infinity; lower the learning rate"
        )
    return kept_rank(rank, gamma) if after < before else rank
