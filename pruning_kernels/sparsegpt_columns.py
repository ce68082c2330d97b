"""The column loop of SparseGPT in numba: rows do not know of each other, so each runs through all columns of a block at once.

A row's weights and the block's part of U stay in the nearest cache, and only pruned weights cause an update.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled

STRIP = 128
"""Columns that are updated together, in a loop of fixed length and so without a branch; U is zero before its diagonal."""

Matrix = NDArray[np.float32]


@compiled(inline="always")
def _choose(
    line: Matrix, reciprocals: Matrix, first: int, end: int, quota: int, pruned: NDArray[np.bool_]
) -> None:
    """Of the weights from ``first`` to ``end`` prune ``quota``: those before which fewer than ``quota`` go."""
    for place in range(first, end):
        score = abs(line[place]) * reciprocals[place]
        before = 0
        for other in range(first, end):
            rival = abs(line[other]) * reciprocals[other]
            before += rival < score or (rival == score and other < place)
        pruned[place] = before < quota


@compiled(inline="always")
def _subtract(line: Matrix, upper: Matrix, lacking: np.float32, column: int) -> None:
    """Take ``lacking`` times row ``column`` of U from a line, by strips, from the one in which the column lies."""
    for start in range(column - column % STRIP, len(line), STRIP):
        strip = line[start : start + STRIP]
        update = upper[column, start : start + STRIP]
        for place in range(STRIP):
            strip[place] -= lacking * update[place]


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
    upper : (width, strips), float32: the block's part of U, with zeros on its right up to a multiple of ``STRIP``
    reciprocals : (width,), float32: 1 / U_jj
    size, quota : of each ``size`` consecutive weights of a row ``quota`` are pruned; if that is 0, ``prune_mask`` says which
    threads : into how many parts the rows are cut
    prune_mask : (rows, width), bool, read or filled
    errors : (rows, width), float32: weights when they were pruned, divided by U_jj; 0 where they were not
    """
    rows, width = weight.shape
    for thread in prange(threads):
        line = np.zeros(upper.shape[1], np.float32)
        error = np.empty(width, np.float32)
        pruned = np.empty(width, np.bool_)
        places = np.empty(width, np.int64)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            for column in range(width):
                line[column], pruned[column], error[column] = (
                    weight[row, column],
                    prune_mask[row, column],
                    0,
                )
            for first in range(0, width, size):
                end = min(first + size, width)
                if quota:
                    _choose(line, reciprocals, first, end, quota, pruned)
                found = 0
                for column in range(first, end):
                    places[found] = column
                    found += pruned[column]
                for place in range(found):
                    column = places[place]
                    error[column] = line[column] * reciprocals[column]
                    _subtract(line, upper, error[column], column)
                    line[column] = 0
            for column in range(width):
                weight[row, column], errors[row, column], prune_mask[row, column] = (
                    line[column],
                    error[column],
                    pruned[column],
                )
