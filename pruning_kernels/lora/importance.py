"""Importance of prunable groups of a frozen matrix, from the gradients of its LoRA factors only.

Sources: FedSpine section 4.2, LoRAPrune. The gradient of W is estimated by ``G = gB A + B gA - gB
gA`` (equation 10), which is a product of thin matrices: ``G = P Q`` with ``P = [gB | B]``
(out_features, 2 rank) and ``Q = [A - gA; gA]`` (2 rank, in_features). It is multiplied by the
matrix that the model computes with, ``M = W + s B A``. The paper leaves out the scaling s, and
LoRAPrune has it. Only a few rows of both matrices are formed at a time.

``exact`` squares ``G M`` of each weight and sums over a group, as equations 10 and 11 say.
``group`` sums first and squares the sum, which is the first-order change of the loss without the
whole group. Terms of different sign cancel in it, so it is another criterion.

Source: FedSpine section 4.3, equations 13 and 14. Equation 14 adds two terms. The first is about
1e-10 and the second about 1, so the first one would have no effect. Here each is divided by its
mean over the devices of the round before the sum. According to the paper's footnote A leads to the
same first term as B. This holds for the signed sum, ``tr(B^T gB) = tr(A gA^T)``, and not for the
squares.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.groups.groups import coupled_sums
from pruning_kernels.lora.factors import Factors, as_float64, singular_values

Score = Literal["exact", "group"]

RowReader = Callable[[int, int], Tensor]
"""Function of a first row and an end that returns these rows, (rows, in_features).

They can have any float dtype.
"""

ROWS_AT_ONCE = 128
"""Number of rows of M that are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of the loss with respect to the factors, before clipping and other changes."""

    b: Tensor
    """(out_features, rank), any float dtype."""
    a: Tensor
    """(rank, in_features), any float dtype."""


def group_importance(
    weight: Tensor | RowReader,
    factors: Factors,
    gradients: Gradients,
    side: int,
    size: int,
    score: Score = "exact",
    rows_at_once: int = ROWS_AT_ONCE,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the importance of each prunable group of a matrix in one step.

    Parameters
    ----------
    weight : the frozen W, (out_features, in_features), or a function that reads rows of it, as for
        a matrix in NF4
    factors, gradients : factors of its adapter and their gradients, on the device of the weight
    side : 0 if a group consists of rows (query, key, value, gate, up), 1 if of columns (the
        attention's output, down)
    size : number of consecutive rows or columns of a group
    score : see the module's docstring
    rows_at_once : number of rows of W and M that are in memory at a time. In addition to P and Q no
        tensor has more than ``rows_at_once * in_features`` numbers, and of ``group`` with side 1
        none more than the larger of this and ``2 rank * in_features``.
    dtype : dtype of the computation, float64 or float32; in float32 a square below 1e-38 is lost

    Returns
    -------
    Tensor
        (groups,), float64, at least 0, on the device of the factors; NaN or infinite if a gradient
        is, see ``moving_average``. The same inputs and ``rows_at_once`` give the same bits.

    Raises
    ------
    ValueError
        Shapes do not match each other or the size of a group, or ``rows_at_once``, ``side`` or
        ``dtype`` is invalid.
    """
    _require(weight, factors, gradients, side, size, rows_at_once, dtype)
    step = _Step(factors, gradients, dtype)
    blocks = _blocks(weight, factors, rows_at_once, dtype)
    with torch.no_grad():
        if score == "exact":
            return step.squares(blocks, side).view(-1, size).sum(dim=1)
        signed = (step.rows, step.columns)[side](blocks)
        return signed.view(-1, size).sum(dim=1).square()


class _Step:
    """Factors of G, and sums over rows or columns of the product of G and M."""

    def __init__(self, factors: Factors, gradients: Gradients, dtype: torch.dtype) -> None:
        self.b = factors.b.detach().to(dtype)
        self.a = factors.a.detach().to(dtype)
        gradient_b = gradients.b.detach().to(dtype)
        gradient_a = gradients.a.detach().to(dtype)
        self.p, self.q = (
            torch.cat([gradient_b, self.b], dim=1),
            torch.cat([self.a - gradient_a, gradient_a]),
        )
        self.scaling = factors.scaling

    def squares(self, blocks: Iterator[tuple[slice, Tensor]], side: int) -> Tensor:
        """Return the sums of ``(G M)^2`` over each row, or each column, float64."""
        found = self.p.new_zeros((self.p.shape[0], self.q.shape[1])[side], dtype=torch.float64)
        for rows, block in blocks:
            products = torch.addmm(block, self.b[rows], self.a, alpha=self.scaling)
            products.mul_(self.p[rows] @ self.q).square_()
            if side == 0:
                found[rows] = coupled_sums(products, 0, 1)
            else:
                found += coupled_sums(products, 1, 1)
        return found

    def rows(self, blocks: Iterator[tuple[slice, Tensor]]) -> Tensor:
        """Return the signed sums of G M over each row, float64.

        They are ``<P_m, (M Q^T)_m>`` with ``M Q^T = W Q^T + s B (A Q^T)``.
        """
        found = self.p.new_zeros(self.p.shape[0], dtype=torch.float64)
        # A small matrix, (rank, 2 rank), that all blocks of rows use.
        shared = self.scaling * (self.a @ self.q.T)
        for rows, block in blocks:
            product = torch.addmm(self.b[rows] @ shared, block, self.q.T)
            found[rows] = (product * self.p[rows]).sum(dim=1, dtype=torch.float64)
        return found

    def columns(self, blocks: Iterator[tuple[slice, Tensor]]) -> Tensor:
        """Return the signed sums of G M over each column, float64.

        They are ``<Q_n, (M^T P)_n>`` with ``M^T P = W^T P + s A^T (B^T P)``.
        """
        product = (self.scaling * (self.b.T @ self.p)).T @ self.a
        for rows, block in blocks:
            product.addmm_(self.p[rows].T, block)
        return product.mul_(self.q).sum(dim=0, dtype=torch.float64)


def _blocks(
    weight: Tensor | RowReader, factors: Factors, rows_at_once: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    out_features, in_features = factors.shape
    for start in range(0, out_features, rows_at_once):
        end = min(start + rows_at_once, out_features)
        read = weight[start:end] if isinstance(weight, Tensor) else weight(start, end)
        if tuple(read.shape) != (end - start, in_features):
            raise ValueError(
                f"rows {start} to {end} of a matrix {factors.shape} cannot have the shape"
                f" {tuple(read.shape)}"
            )
        yield slice(start, end), read.detach().to(dtype)


def _require(
    weight: Tensor | RowReader, factors: Factors, gradients: Gradients, side: int, size: int, rows_at_once: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    shapes = tuple(gradients.b.shape), tuple(gradients.a.shape)
    if shapes != (expected := (tuple(factors.b.shape), tuple(factors.a.shape))):
        raise ValueError(f"gradients are shaped like their factors, {expected}, got {shapes}")
    if isinstance(weight, Tensor) and tuple(weight.shape) != factors.shape:
        raise ValueError(
            f"the weight of an update {factors.shape} has its shape, got {tuple(weight.shape)}"
        )
    if side not in (0, 1) or size < 1 or factors.shape[side] % size:
        raise ValueError(
            f"groups of {size} on side {side} do not fill a matrix {factors.shape}; sides are 0"
            " and 1"
        )
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once has to be at least 1, got {rows_at_once}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"importance is computed in float32 or float64, not in {dtype}")


def combined(matrices: Sequence[Tensor], normalise: bool = True) -> Tensor:
    """Return the importance of prunable groups over all matrices that have parts of them.

    Parameters
    ----------
    matrices : importances by each matrix, (groups,), for the same groups
    normalise : divide each matrix's values by their norm before the sum, as LoRAPrune does;
        otherwise the sum is that of equation 11, in which a matrix with large gradients outweighs
        the others

    Returns
    -------
    Tensor
        (groups,), float64; a matrix whose values are all 0 adds nothing

    Raises
    ------
    ValueError
        There is no matrix, or they have different groups.
    """
    if not matrices or len({tuple(own.shape) for own in matrices}) != 1 or matrices[0].ndim != 1:
        raise ValueError(
            "matrices of one group give vectors of one length, got"
            f" {[tuple(own.shape) for own in matrices]}"
        )
    total = torch.zeros_like(matrices[0], dtype=torch.float64)
    for own in matrices:
        values = own.to(torch.float64)
        if normalise and bool((largest := values.abs().amax()) > 0):
            # Squares of the values could exceed float64.
            values = values / largest
            values = values / values.norm()
        total += values
    return total


def moving_average(former: Tensor | None, seen: Tensor, eta: float) -> Tensor | None:
    """Return ``eta former + (1 - eta) seen`` (equation 12), an average over the steps of a round.

    The paper does not give the initial value. Here it is the first observed value. From zero, as in
    LoRAPrune, all values of the first steps are equally too small, which does not change their
    order. A step with a value that is not finite is skipped.

    Parameters
    ----------
    former : (groups,), float64, or None before the first step
    seen : (groups,)
    eta : in [0, 1]; the paper does not give it

    Raises
    ------
    ValueError
        ``eta`` is not in [0, 1], or the shapes differ.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta has to lie in [0, 1], got {eta}")
    if former is not None and former.shape != seen.shape:
        raise ValueError(
            f"a moving average of {tuple(former.shape)} cannot go on with {tuple(seen.shape)}"
        )
    if not bool(torch.isfinite(seen).all()):
        return former
    values = seen.detach().to(torch.float64)
    return values.clone() if former is None else eta * former + (1 - eta) * values


@dataclass(frozen=True)
class Terms:
    """Both terms of one device.

    Raises
    ------
    ValueError
        A term is not a finite number of at least 0.
    """

    taylor: float
    """Sum of ``(B gB)^2`` over the entries of B of all modules (equations 9 and 13)."""
    spectral: float
    """Mean over modules of the sum of singular values of ``s B A``; the paper uses one module."""

    def __post_init__(self) -> None:
        for name, value in (("taylor", self.taylor), ("spectral", self.spectral)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the {name} term of an importance has to be a finite number of at least 0, got"
                    f" {value}"
                )


def taylor_term(b: Tensor, gradient: Tensor) -> float:
    """Return the sum of ``(B gB)^2`` of one module in one step, computed in float64.

    Parameters
    ----------
    b : (out_features, rank), any float dtype
    gradient : gradient of the loss with respect to ``b``, before clipping

    Raises
    ------
    NotFiniteError
        One of them has NaN or infinity.
    ValueError
        Their shapes differ.
    """
    if b.shape != gradient.shape:
        raise ValueError(
            f"a gradient is shaped like its factor, {tuple(b.shape)}, got {tuple(gradient.shape)}"
        )
    return float((as_float64(b) * as_float64(gradient)).square().sum())


def spectral_term(modules: Sequence[Factors]) -> float:
    """Return the mean over modules of the sum of their updates' singular values.

    No dense matrix is formed.

    Raises
    ------
    ValueError
        There is no module.
    NotFiniteError
        A factor has NaN or infinity.
    """
    if not modules:
        raise ValueError("a device without LoRA modules has no spectral term")
    return fmean(float(singular_values(module).double().sum()) for module in modules)


def comparable(terms: Mapping[int, Terms]) -> dict[int, float]:
    """Return I(B_total) of each device of a round.

    Each term is divided by its mean over the devices, and both are added, so that the mean is 2. A
    term that is 0 at all devices, as both are before B is first trained, distinguishes no devices
    and counts as 1 at each.
    """
    totals = dict.fromkeys(terms, 0.0)
    for values in (
        {key: own.taylor for key, own in terms.items()},
        {key: own.spectral for key, own in terms.items()},
    ):
        # The sum of sorted values does not depend on the order of the devices.
        mean = sum(sorted(value / len(values) for value in values.values()))
        for device, value in values.items():
            totals[device] += value / mean if mean > 0 else 1.0
    return totals
