"""What units of a frozen matrix are worth, by the gradients of its LoRA factors alone (FedSpine section 4.2, LoRAPrune).

The gradient of W is estimated by ``G = gB A + B gA - gB gA`` (equation 10), which is a product of thin matrices: ``G = P Q``
with ``P = [gB | B]`` (out_features, 2 rank) and ``Q = [A - gA; gA]`` (2 rank, in_features). What it is held against is what the
model computes with, ``M = W + s B A``; the paper leaves out the scaling s, LoRAPrune has it. Neither is formed but for a few
rows at a time.

``exact`` squares each weight's ``G M`` and adds up a unit's, as equations 10 and 11 say. ``group`` adds first and squares
the sum: what the loss would change without the whole unit, to the first order. Terms of different sign cancel in it, so it
is another criterion.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.factors import Factors
from pruning_kernels.units import coupled_sums

Score = Literal["exact", "group"]

RowReader = Callable[[int, int], Tensor]
"""From the first row and the one behind the last to these rows, (rows, in_features), any float dtype."""

ROWS_AT_ONCE = 128
"""Rows of M that are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """Of the loss by the factors: after the backward pass, before anything clips them or adds to them."""

    b: Tensor
    """(out_features, rank), any float dtype."""
    a: Tensor
    """(rank, in_features), any float dtype."""


def unit_importance(
    weight: Tensor | RowReader,
    factors: Factors,
    gradients: Gradients,
    side: int,
    size: int,
    score: Score = "exact",
    rows_at_once: int = ROWS_AT_ONCE,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """What each unit of a matrix is worth in one step.

    Parameters
    ----------
    weight : the frozen W, (out_features, in_features), or what reads rows of it, as of a matrix in NF4
    factors, gradients : of its adapter, on the device of the weight
    side : 0 where a unit is rows (query, key, value, gate, up), 1 where it is columns (the attention's output, down)
    size : rows or columns of one unit, next to each other
    score : see above
    rows_at_once : that are read, and made of M. Beside P and Q no tensor has more than ``rows_at_once * in_features`` numbers,
        and of ``group`` with side 1 none more than the larger of these and ``2 rank * in_features``.
    dtype : in which it is computed, float64 or float32; in float32 a square below 1e-38 is lost

    Returns
    -------
    Tensor
        (units,), float64, at least 0, on the device of the factors; NaN or infinite where a gradient is, see
        ``moving_average``. The same inputs and ``rows_at_once`` give the same bits.

    Raises
    ------
    ValueError
        Shapes do not fit each other or the size of a unit, or ``rows_at_once``, ``side`` or ``dtype`` is none.
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
    """Factors of G, and sums over the rows or columns of G and M that need neither."""

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
        """Sums of ``(G M)^2`` over each row, or each column, float64."""
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
        """Signed sums of G M over each row, ``<P_m, (M Q^T)_m>`` with ``M Q^T = W Q^T + s B (A Q^T)``, float64."""
        found = self.p.new_zeros(self.p.shape[0], dtype=torch.float64)
        shared = self.scaling * (self.a @ self.q.T)
        for rows, block in blocks:
            product = torch.addmm(self.b[rows] @ shared, block, self.q.T)
            found[rows] = (product * self.p[rows]).sum(dim=1, dtype=torch.float64)
        return found

    def columns(self, blocks: Iterator[tuple[slice, Tensor]]) -> Tensor:
        """The same over each column, ``<Q_n, (M^T P)_n>`` with ``M^T P = W^T P + s A^T (B^T P)``, float64."""
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
            f"units of {size} on side {side} do not fill a matrix {factors.shape}; sides are 0"
            " and 1"
        )
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once has to be at least 1, got {rows_at_once}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"importance is computed in float32 or float64, not in {dtype}")


def combined(matrices: Sequence[Tensor], normalise: bool = True) -> Tensor:
    """What units are worth by all matrices that they lie in.

    Parameters
    ----------
    matrices : of each matrix (units,), the same units
    normalise : divide each matrix's values by their norm before they are added, as LoRAPrune does; without, the sum is that of
        equation 11, in which a matrix with large gradients outweighs the others

    Returns
    -------
    Tensor
        (units,), float64; a matrix whose values are all 0 adds nothing

    Raises
    ------
    ValueError
        There is no matrix, or they have different units.
    """
    if not matrices or len({tuple(own.shape) for own in matrices}) != 1 or matrices[0].ndim != 1:
        raise ValueError(
            "matrices of one unit give vectors of one length, got"
            f" {[tuple(own.shape) for own in matrices]}"
        )
    total = torch.zeros_like(matrices[0], dtype=torch.float64)
    for own in matrices:
        values = own.to(torch.float64)
        if normalise and bool((largest := values.abs().amax()) > 0):
            values = values / largest  # so that no square is beyond float64
            values = values / values.norm()
        total += values
    return total


def moving_average(former: Tensor | None, seen: Tensor, eta: float) -> Tensor | None:
    """``eta former + (1 - eta) seen`` (equation 12), over the steps of a round.

    The paper does not say where it starts. Here it is the first value; from zero, as LoRAPrune has it, all values of the first
    steps are small alike, which changes no order of them. A step in which a value is not finite counts as none.

    Parameters
    ----------
    former : (units,), float64, or None before the first step
    seen : (units,)
    eta : in [0, 1]; the paper does not name it

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
