"""Select the lowest scores of each comparison group, in numba: a radix select instead of a sort.

A float32 becomes an unsigned integer of the same order. A histogram of the integers' upper bits says in which bin the
last pruned score lies; only that bin is looked at again. Of equal scores the lower index goes first, as in a stable sort,
so the masks have the bits that ``selection.select_lowest`` gives on any device.

All functions take scores as their bits, (rows, columns) uint32, and fill a prune mask of that shape; ``quota`` is how many
of each group are pruned, ``threads`` into how many parts the work is cut.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled

LEVELS = ((21, 11), (10, 11), (0, 10))
"""Shift and width in bits of the digits of a key, from the upper to the lower."""
DIGITS = 1 << 11
COLUMNS_AT_ONCE = 16
"""Columns that are turned into lines together: one cache line of scores."""

Bits = NDArray[np.uint32]
Mask = NDArray[np.bool_]


@compiled(inline="always")
def _key(bits: np.uint32) -> np.uint32:
    """An unsigned integer that is ordered as the float32 with these bits; both zeros have the same."""
    if bits == np.uint32(0x80000000):
        return bits
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@compiled(inline="always")
def _digit_of(histogram: NDArray[np.int64], before: int, quota: int) -> tuple[int, int]:
    """The digit within which the ``quota``-th key lies, and how many keys lie below that digit."""
    digit = 0
    while before + histogram[digit] < quota:
        before += histogram[digit]
        digit += 1
    return digit, before


@compiled()
def threshold_of(keys: Bits, quota: int, scratch: Bits) -> tuple[int, int]:
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
def prune_rows(bits: Bits, quota: int, threads: int, prune_mask: Mask) -> None:
    """Every row is a group; ``quota`` is at least 1."""
    rows, columns = bits.shape
    for thread in prange(threads):
        keys, scratch = np.empty(columns, np.uint32), np.empty(columns, np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            for column in range(columns):
                keys[column] = _key(bits[row, column])
            threshold, ties = threshold_of(keys, quota, scratch)
            for column in range(columns):
                chosen = keys[column] < threshold
                if ties > 0 and keys[column] == threshold:
                    chosen = True
                    ties -= 1
                prune_mask[row, column] = chosen


@compiled(parallel=True)
def prune_columns(bits: Bits, quota: int, threads: int, prune_mask: Mask) -> None:
    """Every column is a group; ``quota`` is at least 1."""
    rows, columns = bits.shape
    strips = -(-columns // COLUMNS_AT_ONCE)
    for thread in prange(threads):
        keys, scratch = np.empty((COLUMNS_AT_ONCE, rows), np.uint32), np.empty(rows, np.uint32)
        thresholds, ties = np.empty(COLUMNS_AT_ONCE, np.int64), np.empty(COLUMNS_AT_ONCE, np.int64)
        for strip in range(strips * thread // threads, strips * (thread + 1) // threads):
            first = strip * COLUMNS_AT_ONCE
            width = min(COLUMNS_AT_ONCE, columns - first)
            for row in range(rows):
                for place in range(width):
                    keys[place, row] = _key(bits[row, first + place])
            for place in range(width):
                thresholds[place], ties[place] = threshold_of(keys[place], quota, scratch)
            for row in range(rows):
                for place in range(width):
                    key = np.int64(keys[place, row])
                    chosen = key < thresholds[place]
                    if key == thresholds[place] and ties[place] > 0:
                        chosen = True
                        ties[place] -= 1
                    prune_mask[row, first + place] = chosen


@compiled(parallel=True)
def prune_pattern(bits: Bits, size: int, quota: int, prune_mask: Mask) -> None:
    """Each ``size`` consecutive weights of a row are a group: a weight goes if fewer than ``quota`` go before it."""
    rows, columns = bits.shape
    for row in prange(rows):
        keys = np.empty(size, np.uint32)
        for first in range(0, columns, size):
            for place in range(size):
                keys[place] = _key(bits[row, first + place])
            for place in range(size):
                before = 0
                for other in range(size):
                    before += keys[other] < keys[place] or (keys[other] == keys[place] and other < place)
                prune_mask[row, first + place] = before < quota


@compiled(parallel=True)
def prune_layer(bits: Bits, quota: int, threads: int, prune_mask: Mask) -> None:
    """The whole matrix is one group; ``quota`` is at least 1.

    Two passes: one counts the keys' upper halves, the other prunes all below the bin of the last one and sets the keys of
    that bin aside; what remains is done among those.
    """
    flat, chosen = bits.reshape(-1), prune_mask.reshape(-1)
    size = bits.size
    counts = np.zeros((threads, 1 << 16), np.int64)
    for thread in prange(threads):
        for place in range(size * thread // threads, size * (thread + 1) // threads):
            counts[thread, _key(flat[place]) >> np.uint32(16)] += 1
    digit, before = _digit_of(counts.sum(axis=0), 0, quota)
    starts = np.zeros(threads + 1, np.int64)
    starts[1:] = np.cumsum(counts[:, digit])
    aside, places = np.empty(starts[-1], np.uint32), np.empty(starts[-1], np.int64)
    for thread in prange(threads):
        found = starts[thread]
        for place in range(size * thread // threads, size * (thread + 1) // threads):
            key = _key(flat[place])
            upper = np.int64(key >> np.uint32(16))
            chosen[place] = upper < digit
            if upper == digit:
                aside[found], places[found] = key, place
                found += 1
    threshold, ties = threshold_of(aside, quota - before, np.empty_like(aside))
    for found in range(len(aside)):
        if aside[found] == threshold and ties > 0:
            ties -= 1
            chosen[places[found]] = True
        elif aside[found] < threshold:
            chosen[places[found]] = True
