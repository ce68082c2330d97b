"""Means of clients' LoRA updates: of the updates themselves, or of their factors as HETLoRA and FedAvg take them.

The mean of products ``sum_i w_i s_i B_i A_i`` has a rank of at most the sum of the clients' ranks: it is the product of the
factors side by side, and ``factors.refactorise`` cuts it to the rank that is wanted without the dense matrix. The mean of the
factors is cheaper and another matrix: ``mean(B) mean(A)`` mixes each client's B with the others' A.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.factors import Factors, as_float32, as_float64, refactorise

PrunedSide = Literal["rows", "columns"]
"""What devices removed of a matrix: output features, rows of B; or input features, columns of A."""

Divisor = Literal["keepers", "all"]
"""``keepers``: a row counts with the devices that kept it; ``all``: where a device lacks it, it counts as zero."""


def weighted_mean(
    clients: Sequence[Factors], weights: Sequence[float], rank: int, scaling: float
) -> Factors:
    """Best approximation of ``sum_i w_i s_i B_i A_i / sum_i w_i`` with this rank (FedSpine equations 15 and 16).

    Equation 16 divides by the number of devices although its weights sum to 1, which would shrink every update by that
    number; the sum of the weights is divided by here.

    Parameters
    ----------
    clients : of one shape; ranks and scalings may differ
    weights : one number per client, at least 0, not all of them 0
    rank, scaling : of the result

    Returns
    -------
    Factors
        float32, ordered and balanced as ``factors.refactorise`` says. N equal clients give the update of each of them.

    Raises
    ------
    ValueError
        There is no client, or the shapes, weights, rank or scaling are not as said.
    NotFiniteError
        A factor holds NaN or infinity.
    """
    shares = _shares(clients, weights)
    _require_one_shape(clients)
    left = [
        as_float64(client.b) * (share * client.scaling)
        for client, share in zip(clients, shares, strict=True)
    ]
    return refactorise(
        torch.cat(left, dim=1),
        torch.cat([as_float64(client.a) for client in clients]),
        rank,
        scaling,
    )


@dataclass(frozen=True, eq=False)
class KeptFactors:
    """The update of a device that keeps some rows, or some columns, of a matrix.

    Raises
    ------
    ValueError
        The map is not a vector of bool.
    """

    factors: Factors
    """Of the kept sub-matrix: B has the kept rows alone, or A the kept columns."""
    keep: Tensor
    """bool, one per row, or per column, of the whole matrix: True where it is kept."""

    def __post_init__(self) -> None:
        if self.keep.ndim != 1 or self.keep.dtype != torch.bool:
            raise ValueError(
                f"a map of kept rows or columns is a vector of bool, got {self.keep.dtype}"
                f" {tuple(self.keep.shape)}"
            )


def coverage_mean(
    clients: Sequence[KeptFactors],
    weights: Sequence[float],
    side: PrunedSide,
    rank: int,
    scaling: float,
    divisor: Divisor = "keepers",
    last: KeptFactors | None = None,
) -> Factors:
    """Best approximation with this rank of the mean in which each row counts with the devices that kept it.

    Row m of device i weighs ``c_i keep_i[m] / sum_j c_j keep_j[m]``; for columns the same. A matrix is pruned on one side only,
    so the weights scale rows of B, or columns of A, and the mean is still a product of the factors side by side. FedSpine
    (section 4.4) does not say what an absent row counts; with ``divisor = "all"`` it counts as zero, which shrinks rows by
    the share of devices that lack them.

    Parameters
    ----------
    clients : devices; their maps are of one length, and the other side of their factors too
    weights : c_i, one number per device, at least 0, not all of them 0
    side : which one was pruned
    rank, scaling : of the result
    divisor : see ``Divisor``
    last : the last global update, of rows that devices without a part in this mean still have. What nobody else kept stays as
        it is there, as far as the rank goes. Rows that no device has at all are better left out: they take singular values.

    Returns
    -------
    Factors
        float32, of the whole matrix, ordered and balanced by ``factors.refactorise``. Rows that nobody of a weight above 0
        kept, and that are not in ``last``, are exactly zero.

    Raises
    ------
    ValueError
        There is no device, a map does not fit its factors, or the shapes, weights, rank or scaling are not as said.
    NotFiniteError
        A factor holds NaN or infinity.
    """
    factors = [client.factors for client in clients]
    shares = _shares(factors, weights)
    _require_maps(clients if last is None else [*clients, last], side)
    coverage = _coverage(clients, shares)
    covered = coverage > 0
    divisors = coverage if divisor == "keepers" else torch.ones_like(coverage)
    blocks = [
        _wide(client, side, share * client.factors.scaling / divisors[client.keep])
        for client, share in zip(clients, shares, strict=True)
    ]
    if last is not None and bool((last.keep & ~covered).any()):
        block = _wide(last, side, torch.full_like(coverage[last.keep], last.factors.scaling))
        block[covered] = 0
        blocks.append(block)
        factors = [*factors, last.factors]
        covered = covered | last.keep
    scaled = torch.cat(blocks, dim=1)[covered]
    whole = [as_float64(f.a if side == "rows" else f.b.T) for f in factors]
    if side == "rows":
        mean = refactorise(scaled, torch.cat(whole), rank, scaling)
        return Factors(_spread(mean.b, covered), mean.a, scaling)
    mean = refactorise(torch.cat(whole).T, scaled.T, rank, scaling)
    return Factors(mean.b, _spread(mean.a.T, covered).T.contiguous(), scaling)


def _coverage(devices: Sequence[KeptFactors], shares: Sequence[float]) -> Tensor:
    """Sum of the shares of the devices that kept each row, float64."""
    found = torch.zeros(devices[0].keep.shape, dtype=torch.float64, device=devices[0].keep.device)
    for device, share in zip(devices, shares, strict=True):
        found += share * device.keep
    return found


def _wide(device: KeptFactors, side: PrunedSide, factors: Tensor) -> Tensor:
    """The factor of the pruned side, (all rows, rank), float64: kept rows times a number each, zero elsewhere."""
    kept = device.factors.b if side == "rows" else device.factors.a.T
    wide = kept.new_zeros((len(device.keep), device.factors.rank), dtype=torch.float64)
    wide[device.keep] = as_float64(kept) * factors[:, None]
    return wide


def zero_padded_mean(clients: Sequence[Factors], weights: Sequence[float], rank: int) -> Factors:
    """Mean of A and mean of B, each padded with zeros to this rank: HETLoRA's aggregation (Cho et al. 2024), and FedAvg's.

    HETLoRA weighs a client with the norm of its update, ``factors.norm``; FedAvg has clients of one rank and weighs them with
    their number of samples. What a client of a low rank lacks counts as zero.

    Parameters
    ----------
    clients : of one shape and one scaling, of this rank or lower ones
    weights : one number per client, at least 0, not all of them 0; norms are all 0 as long as no B has been trained
    rank : of the result

    Returns
    -------
    Factors
        float32, with the clients' scaling: sums in the order of the clients, not ordered by singular values.

    Raises
    ------
    ValueError
        There is no client, or the shapes, weights or scalings are not as said, or a client's rank is higher.
    NotFiniteError
        A factor holds NaN or infinity.
    """
    shares = _shares(clients, weights)
    out_features, in_features = _require_one_shape(clients)
    scalings = sorted({client.scaling for client in clients})
    if len(scalings) > 1:
        raise ValueError(
            f"factors with different scalings have no mean: {scalings}; keep alpha / rank the same"
            " at all clients"
        )
    highest = max(client.rank for client in clients)
    if highest > rank:
        raise ValueError(
            f"rank {rank} is below the rank {highest} of a client; take the highest one"
        )
    b = torch.zeros((out_features, rank), dtype=torch.float64, device=clients[0].b.device)
    a = torch.zeros((rank, in_features), dtype=torch.float64, device=clients[0].a.device)
    for client, share in zip(clients, shares, strict=True):
        b[:, : client.rank] += as_float64(client.b) * share
        a[: client.rank] += as_float64(client.a) * share
    return Factors(as_float32(b), as_float32(a), scalings[0])


def _shares(clients: Sequence[Factors], weights: Sequence[float]) -> list[float]:
    """Weights over their sum; ``ValueError`` where they are no weights of these clients."""
    if not clients or len(clients) != len(weights):
        raise ValueError(
            f"a mean needs clients and as many weights, got {len(clients)} and {len(weights)}"
        )
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                "the weights of a mean have to be finite and at least 0, the one of client"
                f" {number} is not"
            )
    largest = max(weights)
    if largest == 0:
        raise ValueError("the weights of a mean are all 0; give equal ones")
    # Their sum is a number also where that of the weights is too large.
    relative = [weight / largest for weight in weights]
    total = math.fsum(relative)
    return [weight / total for weight in relative]


def _require_one_shape(clients: Sequence[Factors]) -> tuple[int, int]:
    shapes = sorted({client.shape for client in clients})
    if len(shapes) > 1:
        raise ValueError(f"updates of different shapes have no mean: {shapes}")
    return shapes[0]


def _require_maps(clients: Sequence[KeptFactors], side: PrunedSide) -> None:
    """Refuse maps that do not fit their factors, or each other."""
    pruned, whole = (0, 1) if side == "rows" else (1, 0)
    for client in clients:
        if int(client.keep.sum()) != client.factors.shape[pruned]:
            raise ValueError(
                f"a map keeps {int(client.keep.sum())} {side}, its factors have"
                f" {client.factors.shape[pruned]}"
            )
    sizes = sorted({(len(client.keep), client.factors.shape[whole]) for client in clients})
    if len(sizes) > 1:
        raise ValueError(f"devices pruned {side} of matrices of different sizes: {sizes}")


def _spread(kept: Tensor, covered: Tensor) -> Tensor:
    """Rows where ``covered`` is True, and rows of zeros elsewhere."""
    whole = kept.new_zeros((len(covered), kept.shape[1]))
    whole[covered] = kept
    return whole
