"""Plain reference for votes: unpacked masks, counts over a whole matrix, no packed data."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def unpacked(words: NDArray[np.uint64], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return a flat packed mask as booleans in the shape of its matrix."""
    bits = np.unpackbits(
        words.astype("<u8").view(np.uint8), bitorder="little", count=shape[0] * shape[1]
    )
    return bits.astype(np.bool_).reshape(shape)


def plain_vote(
    masks: Sequence[NDArray[np.bool_]], weight: NDArray[np.float32], sparsity: float
) -> NDArray[np.bool_]:
    """Return a mask of ``int(size * sparsity)`` pruned weights of a matrix.

    Weights with most votes are pruned first, then those of smaller magnitude, then those of lower
    index. The function goes from the highest number of votes down. Magnitudes matter only at the
    number of votes where the sparsity is reached.
    """
    votes = np.zeros(weight.size, dtype=np.int32)
    for mask in masks:
        votes += mask.reshape(-1)
    sizes = np.abs(weight).reshape(-1)
    left = int(weight.size * sparsity)
    pruned = np.zeros(weight.size, dtype=np.bool_)
    for number in range(len(masks), -1, -1):
        places = np.flatnonzero(votes == number)
        if places.size > left:
            limit = np.partition(sizes[places], left)[left] if left else np.float32(0)
            below = places[sizes[places] < limit]
            equal = places[sizes[places] == limit]
            places = np.concatenate([below, equal[: left - below.size]])
        pruned[places] = True
        left -= places.size
    return pruned.reshape(weight.shape)
