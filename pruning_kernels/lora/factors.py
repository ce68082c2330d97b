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
    """LoRA adapter of one matrix.

    Raises
    ------
    ValueError
        The factors are not floating-point matrices with matching shapes, or the scaling is not a
        finite number above 0.
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
        """Number of columns of B and rows of A; the rank of the update can be lower."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the update."""
        return self.b.shape[0], self.a.shape[1]


def product(factors: Factors) -> Tensor:
    """Return the update as a dense matrix, ``scaling * B @ A``.

    The result is (out_features, in_features), float32.

    Raises
    ------
    NotFiniteError
        A factor or the update has NaN or infinity.
    """
    return as_float32(as_float64(factors.b) @ as_float64(factors.a) * factors.scaling)


def norm(factors: Factors) -> float:
    """Return the Frobenius norm of the update, HetLoRA's weight of a client (Cho et al. 2024).

    It is ``scaling * sqrt(trace(B^T B A A^T))``. If the columns of B cancel each other, the trace
    suffers from cancellation, and results below 1e-8 of ``||B|| ||A||`` are rounding errors.

    Raises
    ------
    NotFiniteError
        A factor has NaN or infinity, or numbers whose squares exceed float64.
    """
    b = as_float64(factors.b)
    a = as_float64(factors.a)
    trace = _require_finite(((b.T @ b) * (a @ a.T)).sum())
    return factors.scaling * math.sqrt(max(0.0, float(trace)))


def singular_values(factors: Factors) -> Tensor:
    """Return the singular values of the update in descending order: (rank,), float32.

    They are lambda in FedSpine section 4.3. With ``B = Q_b R_b`` and ``A^T = Q_a R_a`` they are
    those of ``R_b R_a^T``, a matrix of at most rank by rank. If the rank exceeds the number of rows
    or columns of the update, the last values are zero.

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
    """Return factors of the best approximation of ``left @ right`` of a given rank.

    Source: Eckart & Young 1936. The first columns and rows of the factors are the best
    approximation of every lower rank too.

    Parameters
    ----------
    left : (out_features, k), any float dtype
    right : (k, in_features), on the device of ``left``
    rank : rank of the result
    scaling : scaling of the result; the product of the result does not depend on it

    Returns
    -------
    Factors
        float32. With ``left = Q_p R_p``, ``right^T = Q_q R_q`` and ``R_p R_q^T = U S V^T``, a
        matrix of k by k, ``B = Q_p U sqrt(S / scaling)`` and ``A = sqrt(S / scaling) V^T Q_q^T``.
        Singular values are in descending order, so the first r columns of B and rows of A are the
        best approximation of rank r. In each column of B the first entry with the largest magnitude
        is positive, so the factors are unique if all singular values differ. If the product has a
        lower rank, the last columns of B and rows of A are zero. Singular values up to ``||left||
        ||right|| max(out_features, in_features) eps`` count as zero, with the eps of float64; this
        is below the resolution of float32.

    Notes
    -----
    Q_p and Q_q are not formed. Their Householder reflections are applied to the wanted columns of U
    and V. If ``k`` is at least ``min(out_features, in_features)``, the dense product is formed and
    decomposed.

    Raises
    ------
    NotFiniteError
        An input, or a factor in float32, has NaN or infinity.
    ValueError
        The shapes do not match, or the rank or the scaling is not above 0.
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
    # Singular vectors are unique up to sign; fix it by the largest entry.
    signs = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    roots = (values / scaling).sqrt() * signs
    b = u.new_zeros(sides[0], rank)
    a = u.new_zeros(rank, sides[1])
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


def _require_scaling(scaling: float) -> None:
    if not (math.isfinite(scaling) and scaling > 0):
        raise ValueError(f"scaling has to be a finite number above 0, got {scaling}")


def _decompose(left: Tensor, right: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first ``count`` singular vectors and values of ``left @ right``.

    They are U (out_features, count), the values, and V (in_features, count).
    """
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
    """Return Q times the vectors without forming Q.

    Parameters
    ----------
    reflections : result of ``torch.geqrf``
    """
    below = vectors.new_zeros(reflections[0].shape[0] - vectors.shape[0], vectors.shape[1])
    return torch.ormqr(*reflections, torch.cat([vectors, below]))
