"""The plain reference of votes: count unpacked masks, prune the weights with most votes of a whole matrix, nothing packed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def unpacked(words: NDArray[np.uint64], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """A flat packed mask as booleans in the shape of its matrix."""
    bits = np.unpackbits(
        words.astype("<u8").view(np.uint8), bitorder="little", count=shape[0] * shape[1]
    )
    return bits.astype(np.bool_).reshape(shape)


def plain_vote(
    masks: Sequence[NDArray[np.bool_]], weight: NDArray[np.float32], sparsity: float
) -> NDArray[np.bool_]:
    """Prune ``int(size * sparsity)`` weights of a matrix: most votes first, then the smaller magnitude, then the lower index.

    One number of votes after the other, from all of them down; only within the number at which the share is full are
    magnitudes looked at.
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
