"""The column loop of SparseGPT in numba: rows do not know of each other, so each runs through all columns of a block at once.

A row's weights and the block's part of U stay in the nearest cache, and only pruned weights cause an update.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled

LANES = 16
"""Updates start at a multiple of this many columns, which is faster than at any column; U is zero before its diagonal."""

Matrix = NDArray[np.float32]


@compiled(inline="always")
def _choose(line: Matrix, reciprocals: Matrix, first: int, size: int, quota: int, pruned: NDArray[np.bool_]) -> None:
    """Prune ``quota`` of the ``size`` weights from ``first`` on: those before which fewer than ``quota`` go."""
    for place in range(first, first + size):
        score = abs(line[place]) * reciprocals[place]
        before = 0
        for other in range(first, first + size):
            rival = abs(line[other]) * reciprocals[other]
            before += rival < score or (rival == score and other < place)
        pruned[place] = before < quota


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
    """Prune and update the weights of one block of columns, and fill ``errors``; all but ``upper`` are (rows, width).

    Parameters
    ----------
    weight : float32, replaced by the updated weights
    upper, reciprocals : (width, width) and (width,), float32: the block's part of U, and 1 / U_jj
    size, quota : of each ``size`` consecutive weights of a row ``quota`` are pruned; with size 0, ``prune_mask`` says which
    threads : into how many parts the rows are cut
    prune_mask : bool, read or filled
    errors : float32: weights when they were pruned, divided by U_jj; 0 where they were not
    """
    rows, width = weight.shape
    for thread in prange(threads):
        line, error = np.empty(width, np.float32), np.empty(width, np.float32)
        pruned = np.empty(width, np.bool_)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            line[:] = weight[row]
            pruned[:] = prune_mask[row]
            for column in range(width):
                if size and column % size == 0:
                    _choose(line, reciprocals, column, size, quota, pruned)
                error[column] = 0
                if pruned[column]:
                    lacking = line[column] * reciprocals[column]
                    error[column] = lacking
                    for right in range(column - column % LANES, width):
                        line[right] -= lacking * upper[column, right]
                    line[column] = 0
            weight[row] = line
            errors[row] = error
            if size:
                prune_mask[row] = pruned
