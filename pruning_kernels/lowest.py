"""Select the lowest scores of each comparison group, in numba: a radix select instead of a sort.

A float32 becomes an unsigned integer of the same order. A histogram of the integers' upper bits says in which bin the
last pruned score lies; only that bin is looked at again. Of equal scores the lower index goes first, as in a stable sort,
so the masks have the bits that ``selection.select_lowest`` gives on any device.

Every function takes ``scores``, (rows, columns) float32, and fills a prune mask of that shape; ``quota`` is how many of each
group are pruned, ``threads`` into how many parts the work is cut. With ``factors``, (columns,) float32, the scores are
``|scores| * factors``, which are never written down; without, ``factors`` is empty. It returns whether a score is NaN; the
mask then means nothing.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled, instruction

LEVELS = ((21, 11), (10, 11), (0, 10))
"""Shift and width in bits of the digits of a key, from the upper to the lower."""
DIGITS = 1 << 11
COLUMNS_AT_ONCE = 16
"""Columns that are turned into lines together: one cache line of scores."""
LOWEST_KEY, HIGHEST_KEY = np.uint32(0x007FFFFF), np.uint32(0xFF800000)
"""Keys of the infinities; what lies beyond them is NaN."""

Scores = NDArray[np.float32]
Keys = NDArray[np.uint32]
Mask = NDArray[np.bool_]


@instruction
def _bits_of(typing: Any, number: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@compiled(inline="always")
def _key(score: np.float32, factors: Scores, column: int) -> np.uint32:
    """An unsigned integer that is ordered as the scores are; both zeros have the same."""
    if len(factors):
        score = abs(score) * factors[column]
    bits = _bits_of(score)
    if bits == np.uint32(0x80000000):
        return bits
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@compiled(inline="always")
def _is_nan(key: np.uint32) -> np.bool_:
    return key < LOWEST_KEY or key > HIGHEST_KEY


@compiled(inline="always")
def _digit_of(histogram: NDArray[np.int64], before: int, quota: int) -> tuple[int, int]:
    """The digit within which the ``quota``-th key lies, and how many keys lie below that digit."""
    digit = 0
    while before + histogram[digit] < quota:
        before += histogram[digit]
        digit += 1
    return digit, before


@compiled()
def threshold_of(keys: Keys, quota: int, scratch: Keys) -> tuple[int, int]:
    """The ``quota``-th lowest key, and how many of its equals are among the ``quota`` lowest; ``scratch`` holds all keys."""
    histogram = np.zeros(DIGITS, np.int64)
    for key in keys:
        histogram[key >> np.uint32(LEVELS[0][0])] += 1
    prefix, before = _digit_of(histogram, 0, quota)
    found = 0
    for key in keys:
        if key >> np.uint32(LEVELS[0][0]) == prefix:
            scratch[found] = key
            found += 1
    for shift, width in LEVELS[1:]:
        low = np.uint32((1 << width) - 1)
        histogram[:] = 0
        for place in range(found):
            histogram[scratch[place] >> np.uint32(shift) & low] += 1
        digit, before = _digit_of(histogram, before, quota)
        prefix = prefix << width | digit
        kept = 0
        for place in range(found):
            if scratch[place] >> np.uint32(shift) & low == digit:
                scratch[kept] = scratch[place]
                kept += 1
        found = kept
    return prefix, quota - before


@compiled(parallel=True)
def prune_rows(scores: Scores, factors: Scores, quota: int, threads: int, prune_mask: Mask) -> np.bool_:
    """Every row is a group; ``quota`` is at least 1."""
    rows, columns = scores.shape
    nan = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys, scratch = np.empty(columns, np.uint32), np.empty(columns, np.uint32)
        found_nan = False
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            for column in range(columns):
                key = _key(scores[row, column], factors, column)
                found_nan |= _is_nan(key)
                keys[column] = key
            threshold, ties = threshold_of(keys, quota, scratch)
            for column in range(columns):
                chosen = keys[column] < threshold
                if ties > 0 and keys[column] == threshold:
                    chosen = True
                    ties -= 1
                prune_mask[row, column] = chosen
        nan[thread] = found_nan
    return nan.any()


@compiled(parallel=True)
def prune_columns(scores: Scores, factors: Scores, quota: int, threads: int, prune_mask: Mask) -> np.bool_:
    """Every column is a group; ``quota`` is at least 1."""
    rows, columns = scores.shape
    strips = -(-columns // COLUMNS_AT_ONCE)
    nan = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys, scratch = np.empty((COLUMNS_AT_ONCE, rows), np.uint32), np.empty(rows, np.uint32)
        thresholds, ties = np.empty(COLUMNS_AT_ONCE, np.int64), np.empty(COLUMNS_AT_ONCE, np.int64)
        found_nan = False
        for strip in range(strips * thread // threads, strips * (thread + 1) // threads):
            first = strip * COLUMNS_AT_ONCE
            width = min(COLUMNS_AT_ONCE, columns - first)
            for row in range(rows):
                for place in range(width):
                    key = _key(scores[row, first + place], factors, first + place)
                    found_nan |= _is_nan(key)
                    keys[place, row] = key
            for place in range(width):
                thresholds[place], ties[place] = threshold_of(keys[place], quota, scratch)
            for row in range(rows):
                for place in range(width):
                    key = int(keys[place, row])
                    chosen = key < thresholds[place]
                    if key == thresholds[place] and ties[place] > 0:
                        chosen = True
                        ties[place] -= 1
                    prune_mask[row, first + place] = chosen
        nan[thread] = found_nan
    return nan.any()


@compiled(parallel=True)
def prune_pattern(scores: Scores, factors: Scores, size: int, quota: int, threads: int, prune_mask: Mask) -> np.bool_:
    """Each ``size`` consecutive weights of a row are a group: a weight goes if fewer than ``quota`` go before it."""
    rows = len(scores)
    nan = np.zeros(threads, np.bool_)
    for thread in prange(threads):
        keys = np.empty((size, scores.shape[1] // size), np.uint32)
        before = np.empty(keys.shape[1], np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            nan[thread] |= _keys_by_place(scores[row], factors, keys)
            for place in range(size):
                _count_before(keys, place, before)
                for group in range(len(before)):
                    prune_mask[row, group * size + place] = before[group] < quota
    return nan.any()


@compiled()
def _keys_by_place(scores: Scores, factors: Scores, keys: Keys) -> np.bool_:
    """The keys of a row, (place in its group, group), so that places are compared for many groups at once."""
    size, groups = keys.shape
    nan = np.bool_(False)
    for place in range(size):
        for group in range(groups):
            key = _key(scores[group * size + place], factors, group * size + place)
            nan |= _is_nan(key)
            keys[place, group] = key
    return nan


@compiled()
def _count_before(keys: Keys, place: int, before: Keys) -> None:
    """How many of each group go before the one at a place: the lower keys, and of equal ones those at lower places."""
    before[:] = 0
    for other in range(len(keys)):
        if other < place:
            for group in range(len(before)):
                before[group] += keys[other, group] <= keys[place, group]
        elif other > place:
            for group in range(len(before)):
                before[group] += keys[other, group] < keys[place, group]


@compiled(parallel=True)
def prune_layer(scores: Scores, factors: Scores, quota: int, threads: int, prune_mask: Mask) -> np.bool_:
    """The whole matrix is one group; ``quota`` is at least 1.

    Two passes: one counts the keys' upper halves, the other prunes all below the bin of the last one and sets the keys of
    that bin aside; what remains is done among those.
    """
    rows, columns = scores.shape
    counts, nan = np.zeros((threads, 1 << 16), np.int64), np.zeros(threads, np.bool_)
    for thread in prange(threads):
        found_nan = False
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            for column in range(columns):
                key = _key(scores[row, column], factors, column)
                found_nan |= _is_nan(key)
                counts[thread, key >> np.uint32(16)] += 1
        nan[thread] = found_nan
    digit, before = _digit_of(counts.sum(axis=0), 0, quota)
    starts = np.zeros(threads + 1, np.int64)
    for thread in range(threads):
        starts[thread + 1] = starts[thread] + counts[thread, digit]
    aside, places = np.empty(starts[-1], np.uint32), np.empty(starts[-1], np.int64)
    for thread in prange(threads):
        found = starts[thread]
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            for column in range(columns):
                key = _key(scores[row, column], factors, column)
                upper = int(key >> np.uint32(16))
                prune_mask[row, column] = upper < digit
                if upper == digit:
                    aside[found], places[found] = key, row * columns + column
                    found += 1
    threshold, ties = threshold_of(aside, quota - before, np.empty_like(aside))
    for found in range(len(aside)):
        chosen = aside[found] < threshold
        if aside[found] == threshold and ties > 0:
            ties -= 1
            chosen = True
        if chosen:
            prune_mask[places[found] // columns, places[found] % columns] = True
    return nan.any()
