"""Selection of the lowest keys of each line, in torch, for tensors on a CUDA device.

It is the counterpart of ``lowest`` on the CPU. Keys are integers, so that the order is the same on
all devices; of equal keys the lower index goes first. Nothing is sorted. The key of the last pruned
weight is found bit by bit, with one pass over all keys per bit. This needs one byte per key,
whereas a sort holds each key twice and its index.
"""

import torch
from torch import Tensor

SHORT_LINE = 16
"""Maximum length of a line whose keys are all compared with each other, as in an n:m pattern."""


def ordered_keys(scores: Tensor) -> Tensor:
    """Return int32 keys, same shape, with the order of float32 scores.

    Both zeros have the same key. Keys of NaN have no meaning.
    """
    bits = scores.contiguous().view(torch.int32)
    # The bit pattern of -0.0.
    bits = bits.masked_fill(bits == torch.iinfo(torch.int32).min, 0)
    # The order of the magnitude bits is reversed for negative scores.
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def prune_lowest(keys: Tensor, quota: int, bits: int | None = None) -> Tensor:
    """Prune the ``quota`` lowest keys of each line; return a bool mask, (lines, size).

    Parameters
    ----------
    keys : (lines, size), int32 or int64
    bits : number of bits of a key if none is negative; None: all bits of the dtype
    """
    if keys.shape[1] <= SHORT_LINE:
        return _ranks(keys) < quota
    last = _last_pruned(keys, quota, bits)
    prune_mask = keys < last
    tied = keys == last
    missing = quota - prune_mask.sum(dim=1, keepdim=True)
    # Of equal keys the first ones of the line are pruned, as many as are missing.
    tied &= tied.cumsum(dim=1, dtype=torch.int32) <= missing
    return prune_mask.logical_or_(tied)


def _ranks(keys: Tensor) -> Tensor:
    """Return the number of keys in the line that precede each key, uint8."""
    ranks = torch.zeros(keys.shape, dtype=torch.uint8, device=keys.device)
    for place in range(keys.shape[1]):
        # (lines, 1), compared with all keys of its line.
        rival = keys[:, place : place + 1]
        # An equal key with a higher index does not precede.
        ranks[:, :place] += rival < keys[:, :place]
        ranks[:, place + 1 :] += rival <= keys[:, place + 1 :]
    return ranks


def _last_pruned(keys: Tensor, quota: int, bits: int | None) -> Tensor:
    """Return the key of the last pruned weight of each line, (lines, 1).

    It is the highest number such that fewer than ``quota`` keys of the line are lower.
    """
    limits = torch.iinfo(keys.dtype)
    last = keys.new_full((len(keys), 1), limits.min if bits is None else 0)
    places = [1 << place for place in reversed(range(limits.bits - 1 if bits is None else bits))]
    for bit in places if bits is not None else [limits.min, *places]:
        # For the sign bit, ``^`` clears it, because it is set in the lowest number; this too is a
        # higher number.
        higher = last ^ bit
        last = torch.where((keys < higher).sum(dim=1, keepdim=True) < quota, higher, last)
    return last
