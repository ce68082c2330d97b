"""Select the lowest keys of each line, in torch: what ``lowest`` does on the CPU, for tensors on another device.

Keys are integers, so that no device orders them in a way of its own; among equal keys the lower index goes first.
"""

import torch
from torch import Tensor

SHORT_LINE = 16
"""Keys of a line up to which each is compared with each, as in an n:m pattern."""
HALF = 1 << 15
"""Half the number of the values that the upper 16 bits of a key have."""


def ordered_keys(scores: Tensor) -> Tensor:
    """int32 keys in the order of float32 scores, same shape; both zeros have the same, and NaN has no meaning."""
    bits = scores.contiguous().view(torch.int32)
    bits = bits.masked_fill(bits == torch.iinfo(torch.int32).min, 0)  # -0.0
    return bits ^ (bits >> 31 & 0x7FFFFFFF)  # the larger the magnitude of a negative score, the lower it is


def prune_lowest(keys: Tensor, quota: int) -> Tensor:
    """Prune the ``quota`` lowest keys of each line.

    Parameters
    ----------
    keys : (lines, size), int32 or int64
    quota : at most ``size``

    Returns
    -------
    Tensor
        bool, same shape, on the same device
    """
    lines, size = keys.shape
    if size <= SHORT_LINE:
        return _ranks(keys) < quota
    if lines == 1 and quota and keys.dtype == torch.int32:
        return _lowest_of_one_line(keys[0], quota)[None]
    lowest = torch.sort(keys, dim=1, stable=True).indices[:, :quota]
    return torch.zeros(keys.shape, dtype=torch.bool, device=keys.device).scatter_(1, lowest, True)


def _ranks(keys: Tensor) -> Tensor:
    """How many keys of its line go before each key, uint8."""
    ranks = torch.zeros(keys.shape, dtype=torch.uint8, device=keys.device)
    for place in range(keys.shape[1]):
        rival = keys[:, place : place + 1]
        ranks[:, :place] += rival < keys[:, :place]
        ranks[:, place + 1 :] += rival <= keys[:, place + 1 :]
    return ranks


def _lowest_of_one_line(keys: Tensor, quota: int) -> Tensor:
    """Prune at once all keys whose upper bits are below those of the last one, and sort those that share them."""
    upper = keys >> 16
    up_to = torch.bincount(upper + HALF, minlength=2 * HALF).cumsum(0)
    last = int(torch.searchsorted(up_to, quota))
    missing = quota - (int(up_to[last - 1]) if last else 0)
    prune_mask = upper < last - HALF
    places = torch.nonzero(upper == last - HALF)[:, 0]
    prune_mask[places[torch.sort(keys[places], stable=True).indices[:missing]]] = True
    return prune_mask
