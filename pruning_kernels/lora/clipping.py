"""Limits of a client's contribution, relative to that of the median client, or to a norm.

A mean has no protection of its own: a single term can move it anywhere. Here a client's change, or
each number of a statistic, is limited to a multiple of the median client's, or to a norm that is
known before. Values within the limit stay as they are, bit by bit.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

MIN_CLIENTS = 3
"""Minimum number of clients for clipping; with one or two the median shows no outlier."""

SINGLE_NUMBERS = 2.0
"""Factor on a ratio for single numbers or rows.

They differ about twice as much between honest clients as whole tensors do.
"""

FLOOR = 0.1
"""Fraction of a typical value that a client may always contribute.

In each direction it is the energy of the median channel, in each row the change of the median row.
"""


def root_mean_square(change: Tensor) -> float:
    """Return the root mean square of a tensor's values, computed in float64; 0 if it is empty."""
    return float(change.to(torch.float64).square().mean().sqrt()) if change.numel() else 0.0


def clip_factors(sizes: Mapping[int, float], max_ratio: float) -> dict[int, float]:
    """Return each client's factor that limits its change to ``max_ratio`` times the median one.

    ``sizes`` are the norms of the clients' changes, and ``max_ratio`` is at least 1. The factor is
    1.0 for changes within the limit. If the median client changed nothing, the limit is 0, and the
    factor of all other changes is 0.0. The median of an even number of clients is the lower of the
    two in the middle.
    """
    if len(sizes) < MIN_CLIENTS:
        return dict.fromkeys(sizes, 1.0)
    limit = max_ratio * median_low(sizes.values())
    # ``size > limit`` with a limit of 0 gives the factor 0.
    return {client: limit / size if size > limit else 1.0 for client, size in sizes.items()}


def within_norm(
    after: Mapping[str, Mapping[str, Tensor]],
    before: Mapping[str, Mapping[str, Tensor]],
    max_norm: float,
) -> dict[str, dict[str, Tensor]]:
    """Scale the change of all tensors together down to an L2 norm, if it is larger.

    Parameters
    ----------
    after : tensors after the change, by block and name; not changed
    before : at least the same tensors before it, of the same shapes
    max_norm : maximum norm, over 0

    Returns
    -------
    Tensors of the dtypes of ``after``; the same ones if the norm is not larger. The change is
    computed in float64, so its norm exceeds the maximum by rounding at most.
    """
    changes = {
        key: {name: value.double() - before[key][name].double() for name, value in block.items()}
        for key, block in after.items()
    }
    squares = (
        float(change.square().sum()) for block in changes.values() for change in block.values()
    )
    norm = math.sqrt(sum(squares))
    if norm <= max_norm:
        return {key: dict(block) for key, block in after.items()}
    factor = max_norm / norm
    return {
        key: {
            name: (before[key][name].double() + factor * change).to(after[key][name].dtype)
            for name, change in block.items()
        }
        for key, block in changes.items()
    }


def distances_from_others(gram: Tensor) -> list[float]:
    """Return the distance of each client's change from the mean of the other clients' changes.

    ``gram``, (clients, clients), float64, has the inner products of at least two clients' changes.
    """
    others = len(gram) - 1
    squared_norms = gram.diagonal()
    with_all = gram.sum(dim=1)
    # Squared norm of the sum of the others: all pairs, without the pairs with the client itself.
    others_squared = gram.sum() - 2 * with_all + squared_norms
    # The squared distance |a - b|^2, expanded to inner products, with b the mean of the others.
    squares = squared_norms - 2 * (with_all - squared_norms) / others + others_squared / others**2
    # Rounding can make a squared distance of almost equal changes negative.
    return squares.clamp(min=0).sqrt().tolist()


def clip_rows(changes: Sequence[Tensor], max_ratio: float) -> list[Tensor]:
    """Return ``clip_factors`` for each row of each client's change: (rows,), float64, per client.

    ``changes`` has the norm of each row's change, (rows,), for each client. A row that the median
    client hardly changed can still change by ``FLOOR`` times the change of the median row. With few
    calibration tokens, or with rows of which hardly anything is pruned, honest clients differ in
    the rows that change at all.
    """
    sizes = torch.stack([change.to(torch.float64) for change in changes])
    if len(changes) < MIN_CLIENTS:
        return list(torch.ones_like(sizes))
    # Of an even number of clients, torch takes the lower of the two in the middle.
    typical = sizes.median(dim=0).values
    limit = max_ratio * typical.clamp(min=FLOOR * float(typical.median()))
    return list(torch.where(sizes > limit, limit / sizes, 1.0))


def within_ratio(numbers: Tensor, max_ratio: float) -> Tensor:
    """Clamp a statistic, (clients, ...), at least 0, to a range around the median client's.

    The range is from 1 / ``max_ratio`` to ``max_ratio`` times the median.
    """
    if len(numbers) < MIN_CLIENTS:
        return numbers
    median = numbers.median(dim=0).values
    return numbers.clamp(median / max_ratio, median * max_ratio)


def within_band(numbers: Tensor, max_ratio: float) -> Tensor:
    """Clamp numbers of either sign, (clients, ...), to a band around the median client's.

    The half-width is ``max_ratio - 1`` times the median's magnitude, or ``max_ratio - 1`` if the
    magnitude is below 1, because the numbers are of the order of 1.
    """
    if len(numbers) < MIN_CLIENTS:
        return numbers
    median = numbers.median(dim=0).values
    width = (max_ratio - 1) * median.abs().clamp(min=1.0)
    return numbers.clamp(median - width, median + width)


def limited_moments(own: Tensor, others: Tensor, max_ratio: float) -> tuple[Tensor, float]:
    """Limit a client's energy in every direction to a multiple of that of the others.

    For every direction u, ``u^T own u <= max_ratio u^T others u + floor``, with a floor that is a
    fraction of the median dimension's energy. A client that exceeds it in some direction could keep
    this direction and displace another one, even if its total energy is small: the strongest
    directions have most of the energy, and those that are cut hardly any.

    Parameters
    ----------
    own, others : (width, width), float64: second moments of one client, and the mean of the other
        clients'
    max_ratio : at least 1

    Returns
    -------
    limited : Tensor
        ``own`` itself if no direction exceeds the bound.
    largest : float
        Factor by which the worst direction exceeds the bound; 1 if none does.
    """
    energies = others.diagonal()
    # At least a tiny multiple of the mean, so that the bound stays definite if most channels are 0.
    floor = max(FLOOR * float(energies.median()), 1e-9 * float(energies.mean()), 1e-30)
    bound = max_ratio * others
    bound.diagonal().add_(floor)
    # 1. One factorisation decides: ``bound - own`` is positive definite if and only if no direction
    # exceeds the bound.
    if int(torch.linalg.cholesky_ex(bound - own).info) == 0:
        return own, 1.0
    root, failed = torch.linalg.cholesky_ex(bound)
    # The others' matrix is not positive semidefinite, so it cannot serve as a bound.
    if int(failed):
        return own, 1.0
    # 2. Eigenvalues of ``own``, in coordinates in which the bound is the identity.
    half = torch.linalg.solve_triangular(root, own, upper=False)
    values, directions = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False))
    if float(values[-1]) <= 1:
        return own, 1.0
    # 3. Lower eigenvalues above 1 to 1, and return to the original coordinates.
    sides = root @ directions
    limited = (sides * values.clamp(max=1.0)) @ sides.T
    # Rounding leaves the product slightly asymmetric.
    return (limited + limited.T) / 2, float(values[-1])
