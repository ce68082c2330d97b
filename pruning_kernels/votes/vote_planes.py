"""Votes as bit planes, in numba: packed masks to planes, and planes to numbers.

Plane ``p`` has bit ``i`` set if the number of votes for weight ``i`` has bit ``p`` set. Masks are
added two at a time and are not unpacked. The planes of a tile of words stay in the first-level
cache, so each mask is read from memory once, and each plane is written once.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled

TILE = 512
"""Number of words that a thread counts at a time."""

Planes = NDArray[np.uint64]
Counts = NDArray[np.unsignedinteger]


@compiled(parallel=True)
def count_votes(masks: NDArray[np.uint64], planes: Planes) -> None:
    """Count the votes of masks, (voters, words), into ``planes``, (bits of their number, words)."""
    words = masks.shape[1]
    for tile in prange(-(-words // TILE)):
        first = tile * TILE
        stop = min(first + TILE, words)
        _count_tile(masks[:, first:stop], planes[:, first:stop])


@compiled()
def _count_tile(masks: NDArray[np.uint64], planes: Planes) -> None:
    words = masks.shape[1]
    sums = np.zeros((len(planes), words), np.uint64)
    one = np.empty(words, np.uint64)
    other = np.zeros(words, np.uint64)
    for voter in range(0, len(masks), 2):
        one[:] = masks[voter]
        if voter + 1 < len(masks):
            other[:] = masks[voter + 1]
        else:
            other[:] = 0
        lowest = sums[0]
        for word in range(words):
            differ = lowest[word] ^ one[word]
            carry = lowest[word] & one[word] | differ & other[word]
            lowest[word] = differ ^ other[word]
            one[word] = carry
        plane = 1
        while plane < len(planes) and (voter + 2) >> plane:
            upper = sums[plane]
            for word in range(words):
                both = upper[word] & one[word]
                upper[word] ^= one[word]
                one[word] = both
            plane += 1
    planes[:] = sums


@compiled(parallel=True)
def numbers_of(planes: Planes, counts: Counts) -> None:
    """Write the number of votes for each weight to ``counts``, (weights,)."""
    for word in prange(-(-len(counts) // 64)):
        for bit in range(min(64, len(counts) - 64 * word)):
            votes = np.uint64(0)
            for plane in range(len(planes)):
                votes |= (planes[plane, word] >> np.uint64(bit) & np.uint64(1)) << np.uint64(plane)
            counts[64 * word + bit] = votes
