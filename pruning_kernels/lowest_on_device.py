"""Select the lowest keys of each line, in torch: what ``lowest`` does on the CPU, for tensors on another device.

Keys are integers, so that no device orders them in a way of its own; among equal keys the lower index goes first. Nothing is
sorted: the key of the last pruned one is found bit by bit, with a pass over all keys for each, which holds a byte per key where
a sort holds each key twice and its index.
"""

import torch
from torch import Tensor

SHORT_LINE = 16
"""Keys of a line up to which each is compared with each, as in an n:m pattern."""


def ordered_keys(scores: Tensor) -> Tensor:
    """int32 keys in the order of float32 scores, same shape; both zeros have the same, and NaN has no meaning."""
    bits = scores.contiguous().view(torch.int32)
    bits = bits.masked_fill(bits == torch.iinfo(torch.int32).min, 0)  # -0.0
    # The larger the magnitude of a negative score, the lower it is.
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def prune_lowest(keys: Tensor, quota: int, bits: int | None = None) -> Tensor:
    """Prune the ``quota`` lowest keys of each line.

    Parameters
    ----------
    keys : (lines, size), int32 or int64
    quota : at most ``size``
    bits : how many of its lowest ones a key has, where none is negative; None: all

    Returns
    -------
    Tensor
        bool, same shape, on the same device
    """
    if keys.shape[1] <= SHORT_LINE:
        return _ranks(keys) < quota
    last = _last_pruned(keys, quota, bits)
    prune_mask = keys < last
    tied = keys == last
    missing = quota - prune_mask.sum(dim=1, keepdim=True)
    tied &= tied.cumsum(dim=1, dtype=torch.int32) <= missing
    return prune_mask.logical_or_(tied)


def _ranks(keys: Tensor) -> Tensor:
    """How many keys of its line go before each key, uint8."""
    ranks = torch.zeros(keys.shape, dtype=torch.uint8, device=keys.device)
    for place in range(keys.shape[1]):
        rival = keys[:, place : place + 1]
        ranks[:, :place] += rival < keys[:, :place]
        ranks[:, place + 1 :] += rival <= keys[:, place + 1 :]
    return ranks


def _last_pruned(keys: Tensor, quota: int, bits: int | None) -> Tensor:
    """The highest number that fewer than ``quota`` keys of a line are below, (lines, 1): the key of the last one."""
    lowest, sign = (
        (torch.iinfo(keys.dtype).min, [torch.iinfo(keys.dtype).min]) if bits is None else (0, [])
    )
    below_sign = torch.iinfo(keys.dtype).bits - 1 if bits is None else bits
    last = torch.full((len(keys), 1), lowest, dtype=keys.dtype, device=keys.device)
    for bit in sign + [1 << place for place in reversed(range(below_sign))]:
        # The sign's bit is set in negative numbers, so taking it away makes one higher, too.
        higher = last ^ bit
        last = torch.where((keys < higher).sum(dim=1, keepdim=True) < quota, higher, last)
    return last
