"""Selection of the most voted weights of each column, on the bit planes of their votes, in numba.

A word of a row holds the bits of 64 columns. Eight words of every row, 512 columns, are processed
together: vector instructions do the same for all columns at once. Arguments are those of
``most_voted``.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from pruning_kernels.compiled import compiled
from pruning_kernels.votes.bit_instructions import lowest_bit
from pruning_kernels.votes.bitmask import LINE_WORDS, Words
from pruning_kernels.votes.most_voted import (
    ALL,
    ONE,
    Places,
    Planes,
    Sizes,
    lower_bits,
    nth_lowest,
    parts_of_rows,
)

WIDTH = 64 * LINE_WORDS
"""Number of columns that are processed together."""
ROWS = 8
"""Number of rows whose bits are added up in registers."""

Lines = NDArray[np.uint64]
"""(rows, 8): bit ``c % 64`` of word ``c // 64`` of a row belongs to column ``c`` of 512."""


def most_voted_in_columns(
    planes: Planes, shape: tuple[int, int], quota: int, sizes: Sizes
) -> Words:
    """Prune the ``quota`` most voted weights of every column."""
    rows, columns = shape
    pruned = np.zeros(planes.shape[1], np.uint64)
    lines = np.zeros((-(-columns // WIDTH), -(-rows // ROWS) * ROWS, LINE_WORDS), np.uint64)
    _prune_columns(planes, rows, columns, quota, sizes, lines)
    _join(lines, parts_of_rows(shape), columns, pruned)
    return pruned


@compiled(parallel=True)
def _prune_columns(
    planes: Planes, rows: int, columns: int, quota: int, sizes: Sizes, lines: Planes
) -> None:
    for strip in prange(len(lines)):
        _prune_strip(planes, rows, columns, strip * WIDTH, quota, sizes, lines[strip])


@compiled()
def _prune_strip(
    planes: Planes, rows: int, columns: int, first: int, quota: int, sizes: Sizes, pruned: Lines
) -> None:
    """Prune up to 512 columns, starting at column ``first``."""
    missing = np.full(WIDTH, quota)
    tied = np.zeros_like(pruned)
    bits = np.zeros_like(pruned)
    for word in range(LINE_WORDS):
        beyond = first + 64 * (word + 1) - columns
        in_matrix = ALL >> np.uint64(max(beyond, 0)) if beyond < 64 else np.uint64(0)
        for row in range(rows):
            tied[row, word] = in_matrix
    for plane in range(len(planes) - 1, -1, -1):
        for row in range(rows):
            _read_line(planes[plane], row * columns + first, tied[row], bits[row])
        take = _columns_to_take(bits, missing)
        for row in range(rows):
            for word in range(LINE_WORDS):
                both = bits[row, word]
                pruned[row, word] |= both & take[word]
                tied[row, word] = (tied[row, word] ^ both) & take[word] | both & ~take[word]
    _prune_tied(tied, missing, columns, first, sizes, pruned)


@compiled(inline="always")
def _read_line(plane: Words, place: int, among: Words, line: Words) -> None:
    """Read eight words, starting at any bit, and keep only the bits that are set in ``among``."""
    word = place >> 6
    shift = np.uint64(place & 63)
    if word + LINE_WORDS < len(plane):
        # Two shifts, because a shift by 64 bits is undefined.
        for lane in range(LINE_WORDS):
            upper = plane[word + lane + 1] << ONE << np.uint64(63) - shift
            line[lane] = (plane[word + lane] >> shift | upper) & among[lane]
    else:
        end = len(plane) - 1
        # Words after the end of the plane belong to no column.
        for lane in range(LINE_WORDS):
            upper = plane[min(word + lane + 1, end)] << ONE << np.uint64(63) - shift
            line[lane] = (plane[min(word + lane, end)] >> shift | upper) & among[lane]


@compiled()
def _columns_to_take(bits: Lines, missing: Places) -> Words:
    """Return the columns whose set bits are all pruned, and reduce ``missing`` by their numbers.

    They are the columns with at most ``missing`` set bits.
    """
    numbers = _count_in_columns(bits)
    take = np.zeros(LINE_WORDS, np.uint64)
    for column in range(WIDTH):
        if numbers[column] <= missing[column]:
            missing[column] -= numbers[column]
            take[column >> 6] |= ONE << np.uint64(column & 63)
    return take


@compiled()
def _count_in_columns(bits: Lines) -> Places:
    """Return the number of set bits in each column.

    Eight rows, and then their carries, are added by carry-save addition.
    """
    levels = 3
    while len(bits) >> levels:
        levels += 1
    counter = np.zeros((levels, LINE_WORDS), np.uint64)
    carry = np.empty(LINE_WORDS, np.uint64)
    for row in range(0, len(bits), ROWS):
        for lane in range(LINE_WORDS):
            ones, twos_a = _full_adder(counter[0, lane], bits[row, lane], bits[row + 1, lane])
            ones, twos_b = _full_adder(ones, bits[row + 2, lane], bits[row + 3, lane])
            ones, twos_c = _full_adder(ones, bits[row + 4, lane], bits[row + 5, lane])
            ones, twos_d = _full_adder(ones, bits[row + 6, lane], bits[row + 7, lane])
            twos, fours_a = _full_adder(counter[1, lane], twos_a, twos_b)
            twos, fours_b = _full_adder(twos, twos_c, twos_d)
            counter[0, lane], counter[1, lane] = ones, twos
            counter[2, lane], carry[lane] = _full_adder(counter[2, lane], fours_a, fours_b)
        for plane in range(3, levels):
            left = np.uint64(0)
            for lane in range(LINE_WORDS):
                both = counter[plane, lane] & carry[lane]
                counter[plane, lane] ^= carry[lane]
                carry[lane] = both
                left |= both
            if left == 0:
                break
    numbers = np.zeros(WIDTH, np.int64)
    for plane in range(levels):
        for column in range(WIDTH):
            numbers[column] += (
                np.int64(counter[plane, column >> 6] >> np.uint64(column & 63) & ONE) << plane
            )
    return numbers


@compiled(inline="always")
def _full_adder(a: np.uint64, b: np.uint64, c: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return sum and carry of three words, bit by bit."""
    differ = a ^ b
    return differ ^ c, a & b | differ & c


@compiled()
def _prune_tied(
    tied: Lines, missing: Places, columns: int, first: int, sizes: Sizes, pruned: Lines
) -> None:
    """Prune the smallest of the tied weights of each column, as many as are missing.

    Without sizes the first ones are pruned.
    """
    low = lower_bits(sizes)
    starts = np.zeros(WIDTH + 1, np.int64)
    numbers = _count_in_columns(tied)
    for column in range(WIDTH):
        starts[column + 1] = starts[column] + numbers[column]
    keys = np.empty(starts[-1], np.uint64)
    found = starts[:-1].copy()
    for row in range(len(tied)):
        for word in range(LINE_WORDS):
            rest = tied[row, word]
            while rest:
                column = word * 64 + int(lowest_bit(rest))
                rest &= rest - ONE
                size = np.int64(sizes[row * columns + first + column]) & low if len(sizes) else 0
                keys[found[column]] = size << 32 | row
                found[column] += 1
    for column in range(min(WIDTH, columns - first)):
        if missing[column] == 0:
            continue
        of_column = keys[starts[column] : starts[column + 1]]
        last = nth_lowest(of_column, missing[column] - 1)
        for key in of_column:
            if key <= last:
                pruned[int(key & np.uint64(0xFFFFFFFF)), column >> 6] |= ONE << np.uint64(
                    column & 63
                )


@compiled(parallel=True)
def _join(lines: Planes, parts: Places, columns: int, pruned: Words) -> None:
    """Write the strips of columns into the rows of a flat mask."""
    for part in prange(len(parts) - 1):
        for row in range(parts[part], parts[part + 1]):
            for word in range(-(-columns // 64)):
                place = row * columns + 64 * word
                bits = lines[word // LINE_WORDS, row, word % LINE_WORDS]
                shift = np.uint64(place & 63)
                pruned[place >> 6] |= bits << shift
                if shift and bits >> np.uint64(64) - shift:
                    pruned[(place >> 6) + 1] |= bits >> np.uint64(64) - shift
