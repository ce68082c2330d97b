"""Column loop of SparseGPT in numba.

Rows are independent, so each thread takes one row through all columns of a block. A row's weights
and the block's part of U stay in the first-level cache, and only pruned weights cause an update.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiler import compiled

STRIP = 128
"""Number of columns that are updated together in a loop of fixed length, without a branch.

U is zero before its diagonal, so that a strip can begin before the pruned column.
"""

Matrix = NDArray[np.float32]


@compiled(inline="always")
def _choose(
    line: Matrix, reciprocals: Matrix, first: int, end: int, quota: int, pruned: NDArray[np.bool_]
) -> None:
    """Mark the ``quota`` lowest-scored weights from ``first`` to ``end`` as pruned."""
    # Quadratic, but a group has few weights, and there is no branch.
    for place in range(first, end):
        score = abs(line[place]) * reciprocals[place]
        before = 0
        for other in range(first, end):
            rival = abs(line[other]) * reciprocals[other]
            # Of equal scores the lower column goes first.
            before += rival < score or (rival == score and other < place)
        pruned[place] = before < quota


@compiled(inline="always")
def _subtract(line: Matrix, upper: Matrix, scale: np.float32, column: int) -> None:
    """Subtract ``scale`` times row ``column`` of U from a line.

    The update begins at the strip that contains ``column``.
    """
    for start in range(column - column % STRIP, len(line), STRIP):
        strip = line[start : start + STRIP]
        update = upper[column, start : start + STRIP]
        for place in range(STRIP):
            strip[place] -= scale * update[place]


@compiled(parallel=True, fastmath={"contract"})
def solve_rows(
    weight: Matrix,
    upper: Matrix,
    reciprocals: Matrix,
    size: int,
    quota: int,
    threads: int,
    prune_mask: NDArray[np.bool_],
    errors: Matrix,
) -> None:
    """Prune and update the weights of one block of columns, and fill ``errors``.

    Parameters
    ----------
    weight : (rows, width), float32, replaced by the updated weights
    upper : (width, strips), float32: the block's part of U, padded on the right with zeros to a
        multiple of ``STRIP``
    reciprocals : (width,), float32: 1 / U_jj
    size, quota : of each ``size`` consecutive weights of a row ``quota`` are pruned; if ``quota``
        is 0, ``prune_mask`` has the pruned weights
    threads : number of parts of the rows
    prune_mask : (rows, width), bool, read or filled
    errors : (rows, width), float32: value of each pruned weight at its pruning, divided by U_jj; 0
        for other weights
    """
    rows, width = weight.shape
    for thread in prange(threads):
        line = np.zeros(upper.shape[1], np.float32)
        error = np.empty(width, np.float32)
        pruned = np.empty(width, np.bool_)
        places = np.empty(width, np.int64)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            # 1. Copy the row to buffers that stay in the cache.
            for column in range(width):
                line[column] = weight[row, column]
                pruned[column] = prune_mask[row, column]
                error[column] = 0
            # 2. Decide groups from left to right; without a quota the choice was made by the
            # caller.
            for first in range(0, width, size):
                end = min(first + size, width)
                if quota:
                    _choose(line, reciprocals, first, end, quota, pruned)
                # Indices of pruned columns without a branch: the place advances only for a pruned
                # one.
                num_pruned = 0
                for column in range(first, end):
                    places[num_pruned] = column
                    num_pruned += pruned[column]
                for place in range(num_pruned):
                    column = places[place]
                    error[column] = line[column] * reciprocals[column]
                    _subtract(line, upper, error[column], column)
                    # Exactly zero: the update of the strip leaves a rounding error here.
                    line[column] = 0
            # 3. Write the row back.
            for column in range(width):
                weight[row, column] = line[column]
                errors[row, column] = error[column]
                prune_mask[row, column] = pruned[column]
