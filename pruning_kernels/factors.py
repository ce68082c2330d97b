"""The update that a LoRA adapter adds to one matrix, kept as its two factors (Hu et al. 2021).

In peft's convention A is ``(rank, in_features)``, B ``(out_features, rank)``, and the update ``scaling * B @ A``. Whatever is
asked about the update here is answered from QR decompositions of the factors, which are thin; the dense matrix, which is not,
is formed where there is no other way. Everything is computed in float64 and rounded once, to float32. The same inputs in the
same order give the same bits for one CPU type, number of threads and torch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning_kernels.scores import NotFiniteError


@dataclass(frozen=True, eq=False)
class Factors:
    """A LoRA adapter of one matrix.

    Raises
    ------
    ValueError
        The factors are not matrices of float numbers that fit each other, or the scaling is not a finite number above 0.
    """

    b: Tensor
    """(out_features, rank), any float dtype."""
    a: Tensor
    """(rank, in_features), any float dtype, on the device of ``b``."""
    scaling: float
    """``alpha / rank`` of LoRA."""

    def __post_init__(self) -> None:
        if not (self.b.is_floating_point() and self.a.is_floating_point()):
            raise ValueError(
                f"the factors of an update have to hold float numbers, got {self.b.dtype} and"
                f" {self.a.dtype}"
            )
        shapes = tuple(self.b.shape), tuple(self.a.shape)
        if (
            self.b.ndim != 2
            or self.a.ndim != 2
            or self.b.shape[1] != self.a.shape[0]
            or 0 in shapes[0] + shapes[1]
        ):
            raise ValueError(
                f"B (out_features, rank) and A (rank, in_features) do not fit each other: {shapes}"
            )
        _require_scaling(self.scaling)

    @property
    def rank(self) -> int:
        """Columns of B and rows of A; the update's own rank may be lower."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the update."""
        return self.b.shape[0], self.a.shape[1]


def product(factors: Factors) -> Tensor:
    """The update as a dense matrix, ``scaling * B @ A``: (out_features, in_features), float32.

    Raises
    ------
    NotFiniteError
        A factor or the update holds NaN or infinity.
    """
    return as_float32(as_float64(factors.b) @ as_float64(factors.a) * factors.scaling)


def norm(factors: Factors) -> float:
    """Frobenius norm of the update, ``scaling * sqrt(trace(B^T B A A^T))``: HetLoRA's weight of a client (Cho et al. 2024).

    Where the columns of B cancel each other the trace does so too, and what is below 1e-8 of ``||B|| ||A||`` is rounding.

    Raises
    ------
    NotFiniteError
        A factor holds NaN or infinity, or numbers whose squares are beyond float64.
    """
    b = as_float64(factors.b)
    a = as_float64(factors.a)
    trace = _require_finite(((b.T @ b) * (a @ a.T)).sum())
    return factors.scaling * math.sqrt(max(0.0, float(trace)))


def singular_values(factors: Factors) -> Tensor:
    """Singular values of the update, largest first: (rank,), float32 (FedSpine section 4.3, its lambda).

    ``B = Q_b R_b`` and ``A^T = Q_a R_a`` leave those of ``R_b R_a^T``, a matrix of at most rank by rank. A rank above the
    number of rows or columns of the update ends in zeros.

    Raises
    ------
    NotFiniteError
        A factor, or a singular value in float32, is NaN or infinite.
    """
    b = torch.linalg.qr(as_float64(factors.b), "r").R
    a = torch.linalg.qr(as_float64(factors.a).T, "r").R
    found = torch.linalg.svdvals(b @ a.T) * factors.scaling
    return as_float32(torch.cat([found, found.new_zeros(factors.rank - len(found))]))


def refactorise(left: Tensor, right: Tensor, rank: int, scaling: float) -> Factors:
    """Factors of the best approximation of ``left @ right`` with this rank (Eckart & Young 1936), for every lower rank too.

    Parameters
    ----------
    left : (out_features, k), any float dtype
    right : (k, in_features), on the device of ``left``
    rank : of the result
    scaling : of the result; the product of the result does not depend on it

    Returns
    -------
    Factors
        float32. With ``left = Q_p R_p``, ``right^T = Q_q R_q`` and ``R_p R_q^T = U S V^T``, a matrix of k by k,
        ``B = Q_p U sqrt(S / scaling)`` and ``A = sqrt(S / scaling) V^T Q_q^T``. Singular values fall, so the first r columns of
        B and rows of A are the best approximation with rank r. In each column of B the entry with the largest magnitude, the
        first of them, is positive: the factors are unique where all singular values differ. Where the product's own rank is
        lower, columns of B and rows of A are zero from there on; singular values count as zero up to
        ``||left|| ||right|| max(out_features, in_features) eps``, float64's rounding, below what float32 tells apart.

    Notes
    -----
    Q_p and Q_q are never formed; the reflections that make them are applied to the columns of U and V that are wanted. From
    ``k = min(out_features, in_features)`` on, the dense product is formed and decomposed.

    Raises
    ------
    NotFiniteError
        An input, or a factor in float32, holds NaN or infinity.
    ValueError
        The shapes do not fit, or the rank or the scaling is not above 0.
    """
    if (
        left.ndim != 2
        or right.ndim != 2
        or left.shape[1] != right.shape[0]
        or 0 in left.shape + right.shape
    ):
        raise ValueError(
            f"there is no product of {tuple(left.shape)} and {tuple(right.shape)} to factorise"
        )
    if rank < 1:
        raise ValueError(f"rank has to be at least 1, got {rank}")
    _require_scaling(scaling)
    left = as_float64(left)
    right = as_float64(right)
    sides = left.shape[0], right.shape[1]
    u, values, v = _decompose(left, right, min(rank, *sides))
    rounding = left.norm() * right.norm() * max(sides) * torch.finfo(torch.float64).eps
    own_rank = int((values > rounding).sum())
    u = u[:, :own_rank]
    values = values[:own_rank]
    v = v[:, :own_rank]
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    roots = (values / scaling).sqrt() * signs
    b = u.new_zeros(sides[0], rank)
    a = u.new_zeros(rank, sides[1])
    b[:, :own_rank] = u * roots
    a[:own_rank] = (v * roots).T
    return Factors(as_float32(b), as_float32(a), scaling)


def as_float64(numbers: Tensor) -> Tensor:
    """The numbers in float64, without a gradient; ``NotFiniteError`` for NaN and infinity."""
    return _require_finite(numbers.detach().to(torch.float64))


def as_float32(numbers: Tensor) -> Tensor:
    """The numbers in float32; ``NotFiniteError`` for those beyond its range."""
    return _require_finite(numbers.to(torch.float32))


def _require_finite(numbers: Tensor) -> Tensor:
    if not bool(torch.isfinite(numbers).all()):
        raise NotFiniteError(
            "the factors of an update hold NaN or infinity, or lead to them; lower the learning"
            " rate"
        )
    return numbers


def _require_scaling(scaling: float) -> None:
    if not (math.isfinite(scaling) and scaling > 0):
        raise ValueError(f"scaling has to be a finite number above 0, got {scaling}")


def _decompose(left: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular vectors U (out_features, count) and V (in_features, count) of ``left @ right``, and their values."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, values, vh = torch.linalg.svd(left @ right, full_matrices=False)
        return u[:, :count], values[:count], vh[:count].T
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
    """Q times the vectors, without Q: ``reflections`` as ``torch.geqrf`` returns them."""
    below = vectors.new_zeros(reflections[0].shape[0] - vectors.shape[0], vectors.shape[1])
    return torch.ormqr(*reflections, torch.cat([vectors, below]))
