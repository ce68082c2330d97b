"""Selection of the lowest scores of each comparison group, in numba, by radix select.

A float32 is mapped to an unsigned integer of the same order. A histogram of the integers' upper
bits gives the bin of the last pruned score, and only this bin is searched again. Of equal scores
the lower index is pruned first, as in a stable sort, so the masks have the bits of
``selection.select_lowest`` on any device.

All functions take ``scores``, (rows, columns) float32, and fill a prune mask of this shape.
``quota`` is the number of pruned weights per group, and ``threads`` the number of parts of the
work. With ``factors``, (columns,) float32, the scores are ``|scores| * factors``, which are not
stored; otherwise ``factors`` is empty. With ``row_sums``, (rows,), and ``column_sums``, (columns,),
as well, they are RIA's scores, ``(|score| / row sum + |score| / column sum) * factor``; otherwise
both are empty. The functions return True if a score is NaN, or with ``factors`` infinite; then the
mask has no meaning.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pruning_kernels.compiler import compiled

LEVELS = ((21, 11), (10, 11), (0, 10))
"""Shift and width in bits of a key's digits, from the upper to the lower."""
DIGITS = 1 << 11
COLUMNS_AT_ONCE = 16
"""Number of columns that are transposed together: one cache line of scores."""
LOWEST_KEY = 0x007FFFFF
HIGHEST_KEY = 0xFF800000
"""Keys of the infinities; keys outside their range are NaN."""

Scores = NDArray[np.float32]
Keys = NDArray[np.uint32]
Mask = NDArray[np.bool_]


@intrinsic
def _bits_of(typing: Any, number: Any) -> Any:
    """Return the bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _quotient(typing: Any, dividend: Any, divisor: Any) -> Any:
    """Return the quotient of two float32 with one instruction.

    Python's division checks for a zero divisor, and this branch would prevent vectorisation.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fdiv(*arguments)

    return types.float32(types.float32, types.float32), generate


@compiled(inline="always")
def _ordered(score: np.float32) -> np.uint32:
    """Return an unsigned integer with the order of the scores; both zeros have the same."""
    bits = _bits_of(score)
    # -0.0 has the bits 0x80000000, which is also the key of +0.0.
    if bits == np.uint32(0x80000000):
        return bits
    # Of negative floats those with larger bits are lower, so the bits are inverted. The sign bit of
    # positive floats is set, so that they follow.
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@compiled(inline="always")
def _share(
    score: np.float32, row_sum: np.float32, column_sum: np.float32, factor: np.float32
) -> np.float32:
    """Return the RIA score of a weight."""
    return (_quotient(abs(score), row_sum) + _quotient(abs(score), column_sum)) * factor


@compiled()
def _keys_of(
    scores: Scores, factors: Scores, row_sums: Scores, row: int, column_sums: Scores, keys: Keys
) -> bool:
    """Compute the keys of a range of a row; return whether one of them cannot be compared.

    There are separate loops, because a loop without branches can be vectorised.
    """
    made = len(factors) > 0
    # With factors infinities are refused too, so the range of valid keys is one smaller at either
    # end.
    lowest = np.uint32(LOWEST_KEY + made)
    highest = np.uint32(HIGHEST_KEY - made)
    if len(column_sums):
        row_sum = row_sums[row]
        for place in range(len(scores)):
            keys[place] = _ordered(
                _share(scores[place], row_sum, column_sums[place], factors[place])
            )
    elif made:
        for place in range(len(scores)):
            keys[place] = _ordered(abs(scores[place]) * factors[place])
    else:
        for place in range(len(scores)):
            keys[place] = _ordered(scores[place])
    unordered = False
    for place in range(len(scores)):
        unordered |= keys[place] < lowest or keys[place] > highest
    return unordered


@compiled(inline="always")
def _digit_of(histogram: NDArray[np.int64], before: int, quota: int) -> tuple[int, int]:
    """Return the digit of the ``quota``-th key, and the number of keys below that digit."""
    digit = 0
    while before + histogram[digit] < quota:
        before += histogram[digit]
        digit += 1
    return digit, before


@compiled()
def threshold_of(keys: Keys, quota: int, scratch: Keys) -> tuple[int, int]:
    """Return the ``quota``-th lowest key, and how many equal keys are among the ``quota`` lowest.

    ``scratch`` has room for all keys.
    """
    histogram = np.zeros(DIGITS, np.int64)
    for key in keys:
        # 1. Histogram of the upper digit; it gives the first digit of the threshold.
        histogram[key >> np.uint32(LEVELS[0][0])] += 1
    prefix, before = _digit_of(histogram, 0, quota)
    # 2. Only the keys with this digit are searched again.
    num_keys = 0
    for key in keys:
        if key >> np.uint32(LEVELS[0][0]) == prefix:
            scratch[num_keys] = key
            num_keys += 1
    # 3. The same for the lower digits; the range shrinks with each.
    for shift, width in LEVELS[1:]:
        low = np.uint32((1 << width) - 1)
        histogram[:] = 0
        for place in range(num_keys):
            histogram[scratch[place] >> np.uint32(shift) & low] += 1
        digit, before = _digit_of(histogram, before, quota)
        prefix = prefix << width | digit
        kept = 0
        for place in range(num_keys):
            if scratch[place] >> np.uint32(shift) & low == digit:
                scratch[kept] = scratch[place]
                kept += 1
        num_keys = kept
    return prefix, quota - before


@compiled(parallel=True)
def prune_rows(
    scores: Scores,
    factors: Scores,
    row_sums: Scores,
    column_sums: Scores,
    quota: int,
    threads: int,
    prune_mask: Mask,
) -> np.bool_:
    """Prune with every row as a group; ``quota`` is at least 1."""
    rows, columns = scores.shape
    # One flag per thread, because a parallel loop cannot raise.
    failed = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys = np.empty(columns, np.uint32)
        scratch = np.empty(columns, np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            # The bad row is processed all the same, and the caller discards the mask.
            failed[thread] |= _keys_of(scores[row], factors, row_sums, row, column_sums, keys)
            threshold, ties = threshold_of(keys, quota, scratch)
            # In order of column: of equal keys the lower index takes the ties.
            for column in range(columns):
                chosen = keys[column] < threshold
                if ties > 0 and keys[column] == threshold:
                    chosen = True
                    ties -= 1
                prune_mask[row, column] = chosen
    return failed.any()


@compiled(parallel=True)
def prune_columns(
    scores: Scores,
    factors: Scores,
    row_sums: Scores,
    column_sums: Scores,
    quota: int,
    threads: int,
    prune_mask: Mask,
) -> np.bool_:
    """Prune with every column as a group; ``quota`` is at least 1."""
    rows, columns = scores.shape
    strips = -(-columns // COLUMNS_AT_ONCE)
    failed = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys = np.empty((COLUMNS_AT_ONCE, rows), np.uint32)
        scratch = np.empty(rows, np.uint32)
        thresholds = np.empty(COLUMNS_AT_ONCE, np.int64)
        ties = np.empty(COLUMNS_AT_ONCE, np.int64)
        line = np.empty(COLUMNS_AT_ONCE, np.uint32)
        for strip in range(strips * thread // threads, strips * (thread + 1) // threads):
            first = strip * COLUMNS_AT_ONCE
            # Narrower in the last strip.
            width = min(COLUMNS_AT_ONCE, columns - first)
            part = slice(first, first + width)
            for row in range(rows):
                failed[thread] |= _keys_of(
                    scores[row, part], factors[part], row_sums, row, column_sums[part], line
                )
                for place in range(width):
                    keys[place, row] = line[place]
            for place in range(width):
                thresholds[place], ties[place] = threshold_of(keys[place], quota, scratch)
            for row in range(rows):
                # Row by row, so that ties of a column go to the lower row.
                for place in range(width):
                    key = int(keys[place, row])
                    chosen = key < thresholds[place]
                    if key == thresholds[place] and ties[place] > 0:
                        chosen = True
                        ties[place] -= 1
                    prune_mask[row, first + place] = chosen
    return failed.any()


@compiled(parallel=True)
def prune_pattern(
    scores: Scores,
    factors: Scores,
    row_sums: Scores,
    column_sums: Scores,
    size: int,
    quota: int,
    threads: int,
    prune_mask: Mask,
) -> np.bool_:
    """Prune with each ``size`` consecutive weights of a row as a group.

    A weight is pruned if fewer than ``quota`` weights of its group precede it.
    """
    rows = len(scores)
    failed = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys = np.empty((size, scores.shape[1] // size), np.uint32)
        before = np.empty(keys.shape[1], np.uint32)
        line = np.empty(scores.shape[1], np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            failed[thread] |= _keys_of(scores[row], factors, row_sums, row, column_sums, line)
            # Transposed, so that the inner loops compare many groups at once.
            for group in range(keys.shape[1]):
                for place in range(size):
                    keys[place, group] = line[group * size + place]
            for place in range(size):
                _count_before(keys, place, before)
                for group in range(len(before)):
                    prune_mask[row, group * size + place] = before[group] < quota
    return failed.any()


@compiled()
def _count_before(keys: Keys, place: int, before: Keys) -> None:
    """Count the weights of each group that precede the one at index ``place``.

    They have lower keys, or equal keys and lower indices.
    """
    before[:] = 0
    for other in range(len(keys)):
        if other < place:
            for group in range(len(before)):
                before[group] += keys[other, group] <= keys[place, group]
        elif other > place:
            for group in range(len(before)):
                before[group] += keys[other, group] < keys[place, group]


@compiled(parallel=True)
def prune_layer(
    scores: Scores,
    factors: Scores,
    row_sums: Scores,
    column_sums: Scores,
    quota: int,
    threads: int,
    prune_mask: Mask,
) -> np.bool_:
    """Prune with the whole matrix as one group; ``quota`` is at least 1.

    The first pass counts the keys' upper halves. The second prunes all keys below the bin of the
    last pruned one and copies the keys of that bin, among which the rest is selected.
    """
    rows, columns = scores.shape
    # One histogram per thread, so that threads never write to the same counter.
    counts = np.zeros((threads, 1 << 16), np.int64)
    failed = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys = np.empty(columns, np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            failed[thread] |= _keys_of(scores[row], factors, row_sums, row, column_sums, keys)
            for column in range(columns):
                counts[thread, keys[column] >> np.uint32(16)] += 1
    # The order of addition does not matter: counts are integers.
    summed = np.zeros(1 << 16, np.int64)
    for thread in range(threads):
        for upper in range(1 << 16):
            summed[upper] += counts[thread, upper]
    digit, before = _digit_of(summed, 0, quota)
    # Each thread writes the keys of the bin to its own range, in row-major order.
    starts = np.zeros(threads + 1, np.int64)
    for thread in range(threads):
        starts[thread + 1] = starts[thread] + counts[thread, digit]
    aside = np.empty(starts[-1], np.uint32)
    places = np.empty(starts[-1], np.int64)
    for thread in prange(threads):
        position = starts[thread]
        keys = np.empty(columns, np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            # Keys are computed again, because storing them would need as much memory as the scores.
            _keys_of(scores[row], factors, row_sums, row, column_sums, keys)
            for column in range(columns):
                upper = int(keys[column] >> np.uint32(16))
                prune_mask[row, column] = upper < digit
                if upper == digit:
                    aside[position] = keys[column]
                    places[position] = row * columns + column
                    position += 1
    # Only the keys of one bin are left; those below it are pruned already.
    threshold, ties = threshold_of(aside, quota - before, np.empty_like(aside))
    for position in range(len(aside)):
        chosen = aside[position] < threshold
        if aside[position] == threshold and ties > 0:
            ties -= 1
            chosen = True
        if chosen:
            prune_mask[places[position] // columns, places[position] % columns] = True
    return failed.any()
