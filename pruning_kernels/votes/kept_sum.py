"""Sum of the kept weights of pruned matrices in a dense matrix, in numba."""

import numpy as np
from numba import prange

from pruning_kernels.compiler import compiled
from pruning_kernels.votes.bit_instructions import popcount

TILE = 4096
"""Number of words that a thread processes at a time."""
ONE = np.uint64(1)


@compiled(parallel=True, nogil=True)
def add_kept(
    total: np.ndarray,
    weights: np.ndarray,
    prune_mask: np.ndarray,
    kept: np.ndarray,
    scale: np.float32,
) -> None:
    """Add ``kept * scale`` to ``total`` and ``scale`` to ``weights`` for every kept weight.

    One thread changes each element, so the result does not depend on the number of threads.

    Parameters
    ----------
    total, weights : (size,), float32
    prune_mask : packed words
    kept : float32, the kept weights in order
    """
    size = len(total)
    words = len(prune_mask)
    tiles = (words + TILE - 1) // TILE
    # First pass: the number of kept weights before each tile, so that tiles can be added in
    # parallel.
    starts = np.zeros(tiles + 1, np.int64)
    for tile in prange(tiles):
        pruned = np.int64(0)
        for word in range(tile * TILE, min(words, (tile + 1) * TILE)):
            pruned += np.int64(popcount(prune_mask[word]))
        starts[tile + 1] = min(size, (tile + 1) * TILE * 64) - tile * TILE * 64 - pruned
    # Sums up to each tile, in order of tile; integers, so exact.
    for tile in range(tiles):
        starts[tile + 1] += starts[tile]
    # Second pass: each tile starts at its own place in ``kept``.
    for tile in prange(tiles):
        place = starts[tile]
        for word in range(tile * TILE, min(words, (tile + 1) * TILE)):
            pruned_here = prune_mask[word]
            first = word * 64
            # The last word can have bits beyond the matrix.
            for bit in range(min(64, size - first)):
                if not (pruned_here >> np.uint64(bit)) & ONE:
                    total[first + bit] += kept[place] * scale
                    weights[first + bit] += scale
                    place += 1
