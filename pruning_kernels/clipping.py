"""Limits of what one client sends, relative to what the median client sends.

A mean has no defence of its own: one term can move it anywhere. Here a client's change, or each number of a statistic, is held
within a multiple of the median client's. What lies within stays as it is, bit by bit.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

LEAST_CLIENTS = 3
"""Minimum number of clients for clipping: of one or two, no median tells which is unusual."""

SINGLE_NUMBERS = 2.0
"""Factor on a ratio for single numbers or rows, which differ about twice as much between honest
clients as whole tensors do."""

FLOOR = 0.1
"""Fraction of what is usual that one client may always have: of the median channel's energy, in each direction, or of the
median row's change, in each row."""


def root_mean_square(change: Tensor) -> float:
    """Return the root mean square of all numbers of a tensor, worked out in float64; 0 of an empty one."""
    return float(change.to(torch.float64).square().mean().sqrt()) if change.numel() else 0.0


def clip_factors(sizes: Mapping[int, float], most_ratio: float) -> dict[int, float]:
    """Return by what each client's change is multiplied so that it is at most ``most_ratio`` times the median one.

    Parameters
    ----------
    sizes : norm of each client's change, at least 0
    most_ratio : 1 or more

    Returns
    -------
    dict
        1.0 where nothing is above; 0.0 where the median client, of an even number the lower of the two in the middle, changed
        nothing.
    """
    if len(sizes) < LEAST_CLIENTS:
        return dict.fromkeys(sizes, 1.0)
    most = most_ratio * median_low(sizes.values())
    return {client: most / size if size > most else 1.0 for client, size in sizes.items()}


def distances_from_others(gram: Tensor) -> list[float]:
    """Return how far each client's change is from the mean of the other clients' changes.

    Parameters
    ----------
    gram : (clients, clients), float64: the inner product of each two clients' changes; at least two clients
    """
    others = len(gram) - 1
    own = gram.diagonal()
    with_all = gram.sum(dim=1)
    of_others = gram.sum() - 2 * with_all + own
    squares = own - 2 * (with_all - own) / others + of_others / others**2
    return squares.clamp(min=0).sqrt().tolist()


def clip_rows(changes: Sequence[Tensor], most_ratio: float) -> list[Tensor]:
    """Return by what each row of each client's change is multiplied: ``clip_factors``, row by row.

    A row that the median client hardly changed may still change by ``FLOOR`` times what its median row does: with few
    calibration tokens, or rows of which hardly anything is pruned, honest clients differ in which rows change at all.

    Parameters
    ----------
    changes : of each client the norm of its change of every row, (rows,)

    Returns
    -------
    list of (rows,) float64
    """
    sizes = torch.stack([change.to(torch.float64) for change in changes])
    if len(changes) < LEAST_CLIENTS:
        return list(torch.ones_like(sizes))
    typical = sizes.median(dim=0).values  # of an even number torch takes the lower one
    most = most_ratio * typical.clamp(min=FLOOR * float(typical.median()))
    return list(torch.where(sizes > most, most / sizes, 1.0))


def within_ratio(numbers: Tensor, most_ratio: float) -> Tensor:
    """Hold every number of a statistic between 1 / ``most_ratio`` and ``most_ratio`` times the median client's.

    Parameters
    ----------
    numbers : (clients, ...), at least 0

    Returns
    -------
    The same shape and dtype
    """
    if len(numbers) < LEAST_CLIENTS:
        return numbers
    median = numbers.median(dim=0).values
    return numbers.clamp(median / most_ratio, median * most_ratio)


def within_band(numbers: Tensor, most_ratio: float) -> Tensor:
    """Hold numbers of either sign near the median client's: no further than ``most_ratio - 1`` times its magnitude, or 1.

    Parameters
    ----------
    numbers : (clients, ...), of the order of 1
    most_ratio : 1 or more
    """
    if len(numbers) < LEAST_CLIENTS:
        return numbers
    median = numbers.median(dim=0).values
    width = (most_ratio - 1) * median.abs().clamp(min=1.0)
    return numbers.clamp(median - width, median + width)


def limited_moments(own: Tensor, others: Tensor, most_ratio: float) -> tuple[Tensor, float]:
    """Limit the energy of one client's signals in every direction to a multiple of that of the others'.

    For every direction u, ``u^T own u <= most_ratio u^T others u + floor``, where the floor is a share of the median lane's
    energy. Whoever exceeds it in some direction could keep that one and displace another, however small the whole is: the
    strongest directions have most of the energy, and those that are cut hardly any.

    Parameters
    ----------
    own, others : (width, width), float64, second moments of one client, and the mean of the other clients'
    most_ratio : 1 or more

    Returns
    -------
    limited : ``own`` itself where no direction is above the bound
    largest : how many times the bound the worst direction is; 1 where none is above

    Notes
    -----
    Whether a direction is above says one Cholesky factorisation. Only then are directions sought, by the eigenvalues of ``own``
    in the coordinates in which the bound is the identity; those above 1 become 1.
    """
    energies = others.diagonal()
    floor = max(FLOOR * float(energies.median()), 1e-9 * float(energies.mean()), 1e-30)
    bound = most_ratio * others
    bound.diagonal().add_(floor)
    if int(torch.linalg.cholesky_ex(bound - own).info) == 0:
        return own, 1.0
    root, failed = torch.linalg.cholesky_ex(bound)
    # The others' moments are none, by more than rounding: nothing is to be learned from them.
    if int(failed):
        return own, 1.0
    half = torch.linalg.solve_triangular(root, own, upper=False)
    values, directions = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False))
    if float(values[-1]) <= 1:
        return own, 1.0
    sides = root @ directions
    limited = (sides * values.clamp(max=1.0)) @ sides.T
    return (limited + limited.T) / 2, float(values[-1])
