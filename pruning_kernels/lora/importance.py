"""Importance of prunable groups of a frozen matrix, from the gradients of its LoRA factors only.

Sources: FedSpine section 4.2, LoRAPrune. The gradient of W is estimated by ``G = gB A + B gA - gB
gA`` (equation 10), which is a product of thin matrices: ``G = P Q`` with ``P = [gB | B]``
(out_features, 2 rank) and ``Q = [A - gA; gA]`` (2 rank, in_features). It is multiplied by the
matrix that the model computes with, ``M = W + s B A``. The paper leaves out the scaling s, and
LoRAPrune has it. Only a few rows of both matrices are formed at a time.

``exact`` squares ``G M`` of each weight and sums over a group, as equations 10 and 11 say.
``group`` sums first and squares the sum, which is the first-order change of the loss without the
whole group. Terms of different sign cancel in it, so it is another criterion.

FedSpine's section 4.3 compares devices by the importance of all their LoRA modules. Equation 14
adds two terms. The first is about 1e-10 and the second about 1, so the first one would have no
effect. Here each is divided by its mean over the devices of the round before the sum. According to
the paper's footnote A leads to the same first term as B. This holds for the signed sum, ``tr(B^T
gB) = tr(A gA^T)``, and not for the squares.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.lora.factors import Factors, as_float64, singular_values

Score = Literal["exact", "group"]

RowReader = Callable[[int, int], Tensor]
"""Function of a first row and an end that returns these rows, (rows, in_features), any float."""

ROWS_AT_ONCE = 128
"""Number of rows of W and M that are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of the loss with respect to the factors, before clipping and other changes."""

    b: Tensor
    """(out_features, rank), any float dtype."""
    a: Tensor
    """(rank, in_features), any float dtype."""


@torch.no_grad()
def group_importance(
    weight: Tensor | RowReader,
    factors: Factors,
    gradients: Gradients,
    side: int,
    size: int,
    score: Score = "exact",
    order: Tensor | None = None,
) -> Tensor:
    """Return the importance of each prunable group of a matrix in one step.

    In addition to P and Q no tensor is larger than ``ROWS_AT_ONCE`` rows of W, or than Q.

    Parameters
    ----------
    weight : the frozen W, (out_features, in_features), or a function that reads rows of it, as for
        a matrix in NF4
    factors, gradients : factors of its adapter and their gradients, on the device of the weight
    side : 0 if a group consists of rows (query, key, value, gate, up), 1 if of columns (the
        attention's output, down)
    size : number of rows or columns of a group, which are consecutive
    score : see the module's docstring
    order : rows or columns group by group, int64, if those of a group are not consecutive

    Returns
    -------
    Tensor
        (groups,), float64, at least 0, on the device of the factors; NaN or infinite if a gradient
        is, see ``moving_average``. The same inputs give the same bits.
    """
    b, a, gradient_b, gradient_a = (
        tensor.to(torch.float64) for tensor in (factors.b, factors.a, gradients.b, gradients.a)
    )
    # G = P Q, equation 10.
    p = torch.cat([gradient_b, b], dim=1)
    q = torch.cat([a - gradient_a, gradient_a])
    scaling = factors.scaling
    sums = b.new_zeros(factors.shape[side])
    if score == "exact":
        for rows, block in _blocks(weight, factors.shape[0]):
            # M = W + s B A for these rows, then G M elementwise, squared.
            products = torch.addmm(block, b[rows], a, alpha=scaling)
            products.mul_(p[rows] @ q).square_()
            if side == 0:
                sums[rows] = products.sum(dim=1)
            else:
                sums += products.sum(dim=0)
    elif side == 0:
        # <P_m, (M Q^T)_m> with M Q^T = W Q^T + s B (A Q^T), whose last product is small.
        shared = scaling * (a @ q.T)
        for rows, block in _blocks(weight, factors.shape[0]):
            sums[rows] = torch.addmm(b[rows] @ shared, block, q.T).mul_(p[rows]).sum(dim=1)
    else:
        # <Q_n, (M^T P)_n> with M^T P = W^T P + s A^T (B^T P).
        product = (scaling * (b.T @ p)).T @ a
        for rows, block in _blocks(weight, factors.shape[0]):
            product.addmm_(p[rows].T, block)
        sums = product.mul_(q).sum(dim=0)
    sums = sums if order is None else sums[order]
    # (groups, size)
    importance = sums.view(-1, size).sum(dim=1)
    # Squared after the sum over the group, so terms of different sign cancel.
    return importance if score == "exact" else importance.square()


def _blocks(weight: Tensor | RowReader, out_features: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows of W at a time, float64."""
    for start in range(0, out_features, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, out_features)
        read = weight[start:end] if isinstance(weight, Tensor) else weight(start, end)
        yield slice(start, end), read.to(torch.float64)


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
    """
    total = torch.zeros_like(matrices[0], dtype=torch.float64)
    for importance in matrices:
        # In float64, because importances are squares of small gradients.
        values = importance.to(torch.float64)
        if normalise and bool((largest := values.abs().amax()) > 0):
            # Squares of the values could exceed float64.
            values = values / largest
            values = values / values.norm()
        total += values
    return total


def moving_average(former: Tensor | None, seen: Tensor, eta: float) -> Tensor | None:
    """Return ``eta former + (1 - eta) seen`` (equation 12), (groups,), float64.

    It is an average over the steps of a round. The paper does not give the initial value. Here it
    is the first observed value. From zero, as in LoRAPrune, all values of the first steps are
    equally too small, which does not change their order. A step with a value that is not finite is
    skipped; the result is None before the first other step.
    """
    # One overflow, for instance in mixed precision, must not spoil the average for the round.
    if not bool(torch.isfinite(seen).all()):
        return former
    values = seen.detach().to(torch.float64)
    return values.clone() if former is None else eta * former + (1 - eta) * values


@dataclass(frozen=True)
class Terms:
    """Both terms of one device, finite and at least 0."""

    taylor: float
    """Sum of ``(B gB)^2`` over the entries of B of all modules (equations 9 and 13)."""
    spectral: float
    """Mean over modules of ``spectral_term``; the paper uses one module."""


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
    """
    return float((as_float64(b) * as_float64(gradient)).square().sum())


def spectral_term(module: Factors) -> float:
    """Return the sum of the singular values of a module's update; see ``singular_values``."""
    return float(singular_values(module).double().sum())


def comparable(terms: Mapping[int, Terms]) -> dict[int, float]:
    """Return I(B_total) of each device of a round.

    Each term is divided by its mean over the devices, and both are added, so that the mean is 2. A
    term that is 0 at all devices, as both are before B is first trained, distinguishes no devices
    and counts as 1 at each.
    """
    totals = dict.fromkeys(terms, 0.0)
    for values in (
        {key: term.taylor for key, term in terms.items()},
        {key: term.spectral for key, term in terms.items()},
    ):
        # The sum of sorted values does not depend on the order of the devices.
        mean = sum(sorted(value / len(values) for value in values.values()))
        for device, value in values.items():
            totals[device] += value / mean if mean > 0 else 1.0
    return totals
