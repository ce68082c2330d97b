"""Coordinate-wise trimmed mean and median of what several clients send.

Source: Yin, Chen, Ramchandran and Bartlett 2018, *Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates*, definitions 1 and 2. In each coordinate the largest and the smallest
values are left out, and the mean of the others is taken. So a client cannot move a number beyond
those of the other clients, whatever it sends, as long as at least as many values are left out at
each end as there are bad clients. The median is the trimmed mean that leaves out as many as
possible: one value stays, or the two in the middle.

The paper weights clients equally. Here the clients' weights apply to the values that stay.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pruning_kernels.selection.scores import NotFiniteError

NUMBERS_AT_ONCE = 1 << 22
"""Number of values that are sorted at a time, of all clients together."""


def trimmed_mean(values: Sequence[Tensor], weights: Sequence[float], trim: int) -> Tensor:
    """Return the weighted mean of the values that stay in each coordinate.

    Parameters
    ----------
    values : one tensor per client, of one shape and one floating dtype
    weights : one number above 0 per client
    trim : number of values to leave out at each end, at least 0 and less than half of them; of
        equal values, the one of the client that comes first counts as the smaller one

    Returns
    -------
    Tensor
        float64, of the shape of the values

    Raises
    ------
    NotFiniteError
        A value is NaN or infinite. It has no place in the order.
    ValueError
        ``trim`` leaves nothing, or a weight is not above 0.
    """
    clients = len(values)
    if not 0 <= 2 * trim < clients:
        raise ValueError(f"{trim} of {clients} values cannot be left out at each end")
    if not all(weight > 0 for weight in weights):
        raise ValueError("a weight of a trimmed mean has to be above 0")
    client_weights = torch.tensor(weights, dtype=torch.float64)
    flat = [tensor.flatten() for tensor in values]
    # A chunk has all clients' values of some coordinates.
    at_once = max(1, NUMBERS_AT_ONCE // clients)
    means = [
        _of_columns(torch.stack(columns), client_weights, trim)
        for columns in zip(*(tensor.split(at_once) for tensor in flat), strict=True)
    ]
    return torch.cat(means).view(values[0].shape)


def _of_columns(columns: Tensor, weights: Tensor, trim: int) -> Tensor:
    """Return the trimmed mean of each column of (clients, numbers): (numbers,), float64."""
    if not bool(torch.isfinite(columns).all()):
        raise NotFiniteError("a value of a trimmed mean is not finite")
    # A stable order: of equal values with different weights, always the same ones stay.
    ordered, clients = columns.sort(dim=0, stable=True)
    stays = slice(trim, len(columns) - trim)
    # (clients that stay, numbers): the weight belongs to the client, so it follows its value.
    counted = weights[clients[stays]]
    # Relative weights: one value that stays is returned bit by bit.
    return (ordered[stays].to(torch.float64) * (counted / counted.sum(dim=0))).sum(dim=0)
