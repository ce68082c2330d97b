"""Means of clients' LoRA updates: of the updates, or of their factors as in HETLoRA and FedAvg.

The mean of products ``sum_i w_i s_i B_i A_i`` is the product of the concatenated factors, and
``factors.refactorise`` reduces it to the wanted rank without the dense matrix. The mean of the
factors is cheaper but another matrix: ``mean(B) mean(A)`` mixes each client's B with the A of the
others. In all functions the clients' weights are at least 0 and not all 0; a weight that is none
raises ``ValueError``, and a factor with NaN or infinity ``NotFiniteError``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.lora.factors import Factors, as_float32, as_float64, refactorise

PrunedSide = Literal["rows", "columns"]
"""Pruned side of a matrix.

``rows`` are output features, rows of B. ``columns`` are input features, columns of A.
"""

Divisor = Literal["keepers", "all"]
"""Divisor of the mean.

- ``keepers``: a row is averaged over the devices that kept it
- ``all``: a row is averaged over all devices, and counts as zero at devices without it
"""


def weighted_mean(
    clients: Sequence[Factors], weights: Sequence[float], rank: int, scaling: float
) -> Factors:
    """Return the best approximation of a given rank of the weighted mean of updates.

    The mean is ``sum_i w_i s_i B_i A_i / sum_i w_i`` (FedSpine equations 15 and 16). Equation 16
    divides by the number of devices although its weights sum to 1, which would shrink every update
    by that number. Here the sum of the weights is the divisor.

    Parameters
    ----------
    clients : updates of one shape; ranks and scalings can differ
    weights : one number per client
    rank, scaling : rank and scaling of the result

    Returns
    -------
    Factors
        float32, ordered and balanced as in ``factors.refactorise``
    """
    relative = relative_weights(weights)
    left = [
        as_float64(client.b) * (weight * client.scaling)
        for client, weight in zip(clients, relative, strict=True)
    ]
    return refactorise(
        torch.cat(left, dim=1),
        torch.cat([as_float64(client.a) for client in clients]),
        rank,
        scaling,
    )


@dataclass(frozen=True, eq=False)
class KeptFactors:
    """Update of a device that keeps only some rows, or some columns, of a matrix."""

    factors: Factors
    """Factors of the kept sub-matrix: B has only the kept rows, or A only the kept columns."""
    keep: Tensor
    """(rows,) or (columns,) of the whole matrix, bool: True if it is kept."""


def coverage_mean(
    clients: Sequence[KeptFactors],
    weights: Sequence[float],
    side: PrunedSide,
    rank: int,
    scaling: float,
    divisor: Divisor = "keepers",
    last: KeptFactors | None = None,
) -> Factors:
    """Return the best approximation of a given rank of a mean over the devices that kept a row.

    Row m of device i has the weight ``c_i keep_i[m] / sum_j c_j keep_j[m]``; the same holds for
    columns. A matrix is pruned on one side only, so the weights scale rows of B, or columns of A,
    and the mean is still a product of concatenated factors. FedSpine (section 4.4) does not define
    the value of an absent row. With ``divisor = "all"`` it counts as zero, which shrinks rows that
    some devices lack.

    Parameters
    ----------
    clients : updates of the devices; their maps have one length, and the other sides of their
        factors too
    weights : c_i, one number per device
    rank, scaling : rank and scaling of the result
    last : last global update, with the rows of devices that do not take part in this mean. Rows
        that no participant kept stay as they are in it, as far as the rank permits. Rows that no
        device has should be left out, because they use up singular values.

    Returns
    -------
    Factors
        float32, of the whole matrix, ordered and balanced as in ``factors.refactorise``. Rows that
        no device with a weight above 0 kept, and that are not in ``last``, are exactly zero.
    """
    # 1. Weight of the devices that kept each row.
    factors = [client.factors for client in clients]
    relative = relative_weights(weights)
    coverage = torch.zeros_like(clients[0].keep, dtype=torch.float64)
    for client, weight in zip(clients, relative, strict=True):
        coverage += weight * client.keep
    covered = coverage > 0
    divisors = coverage if divisor == "keepers" else torch.ones_like(coverage)
    # 2. Scale each device's rows, so that the weights of a row sum to 1.
    blocks = [
        _wide(client, side, weight * client.factors.scaling / divisors[client.keep])
        for client, weight in zip(clients, relative, strict=True)
    ]
    # 3. Rows that only the last update has keep its values.
    if last is not None and bool((last.keep & ~covered).any()):
        block = _wide(last, side, torch.full_like(coverage[last.keep], last.factors.scaling))
        block[covered] = 0
        blocks.append(block)
        factors = [*factors, last.factors]
        covered = covered | last.keep
    # 4. Refactorise the covered rows only: absent ones would use up singular values.
    scaled = torch.cat(blocks, dim=1)[covered]
    uncut_side = [as_float64(f.a if side == "rows" else f.b.T) for f in factors]
    if side == "rows":
        mean = refactorise(scaled, torch.cat(uncut_side), rank, scaling)
        return Factors(_spread(mean.b, covered), mean.a, scaling)
    mean = refactorise(torch.cat(uncut_side).T, scaled.T, rank, scaling)
    return Factors(mean.b, _spread(mean.a.T, covered).T.contiguous(), scaling)


def _wide(device: KeptFactors, side: PrunedSide, factors: Tensor) -> Tensor:
    """Return the factor of the pruned side for all rows, (all rows, rank), float64.

    Kept rows are multiplied by one number each; all others are zero.
    """
    kept = device.factors.b if side == "rows" else device.factors.a.T
    wide = kept.new_zeros((len(device.keep), device.factors.rank), dtype=torch.float64)
    wide[device.keep] = as_float64(kept) * factors[:, None]
    return wide


def zero_padded_mean(clients: Sequence[Factors], weights: Sequence[float], rank: int) -> Factors:
    """Return the mean of A and the mean of B, each padded with zeros to a given rank.

    This is the aggregation of HETLoRA (Cho et al. 2024) and FedAvg. HETLoRA weights a client by the
    norm of its update, ``factors.norm``. FedAvg has clients of one rank and weights them by their
    number of samples. Missing ranks of a client count as zero.

    Parameters
    ----------
    clients : updates of one shape and one scaling, of at most this rank
    weights : one number per client; norms are all 0 until a B was trained
    rank : rank of the result

    Returns
    -------
    Factors
        float32, with the clients' scaling, summed in the order of the clients and not ordered by
        singular values
    """
    relative = relative_weights(weights)
    out_features, in_features = clients[0].shape
    b = torch.zeros((out_features, rank), dtype=torch.float64, device=clients[0].b.device)
    a = torch.zeros((rank, in_features), dtype=torch.float64, device=clients[0].a.device)
    for client, weight in zip(clients, relative, strict=True):
        b[:, : client.rank] += as_float64(client.b) * weight
        a[: client.rank] += as_float64(client.a) * weight
    return Factors(as_float32(b), as_float32(a), clients[0].scaling)


def relative_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum; raise ``ValueError`` if they are invalid."""
    largest = max(weights)
    if not (all(math.isfinite(weight) and weight >= 0 for weight in weights) and largest > 0):
        raise ValueError(
            "the weights of a mean have to be finite and at least 0, and not all of them 0"
        )
    # Dividing by the largest weight first prevents an overflow of the sum.
    relative = [weight / largest for weight in weights]
    total = math.fsum(relative)
    return [weight / total for weight in relative]


def _spread(kept: Tensor, covered: Tensor) -> Tensor:
    """Return a matrix with the given rows where ``covered`` is True, and zeros elsewhere."""
    padded = kept.new_zeros((len(covered), kept.shape[1]))
    padded[covered] = kept
    return padded
