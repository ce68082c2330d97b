"""Selection of the most voted weights on the bit planes of their votes, in numba.

``planes`` are (number of planes, words) uint64 from ``carry_save``, with zeros after the last
weight. Masks and results are flat words as in ``bitmask``. ``sizes`` breaks ties between equally
voted weights: unsigned integers, (weights,), whose upper bit is ignored, so that the bits of a
float count as its magnitude. If it is empty, the lower index goes first.

A word of a row holds the bits of 64 columns. The selection by column processes eight words of every
row, 512 columns, together: vector instructions do the same for all columns at once.
"""

import math

import numpy as np
from numba import get_num_threads, prange
from numpy.typing import NDArray

from pruning_kernels.compiler import compiled
from pruning_kernels.selection.lowest_scores import threshold_of
from pruning_kernels.votes.bit_instructions import lowest_bit, popcount
from pruning_kernels.votes.bitmask import LINE_WORDS, Words, pack

ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
TILE = 512
"""Number of words that are compared together; their results stay in the first-level cache."""
SAMPLE = 61
"""Sampling interval, in lines, of the guess of the vote threshold.

It does not divide the length of a row, so that all columns are sampled.
"""
FEW = 16
"""Inverse fraction of tied weights up to which ties are sorted out without a histogram."""

Planes = NDArray[np.uint64]
Sizes = NDArray[np.unsignedinteger]
Places = NDArray[np.int64]
Keys = NDArray[np.uint32]


def most_voted_in_layer(planes: Planes, num_weights: int, quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of all weights.

    The vote threshold is guessed from a sample, and the guess is verified on all planes. If it is
    wrong, other thresholds are tried at growing distances. Once the threshold is bracketed, the
    search continues by bisection.
    """
    pruned = np.empty(planes.shape[1], np.uint64)
    tied = np.empty(planes.shape[1], np.uint64)
    # One contiguous part of the words per thread.
    parts = np.linspace(0, len(tied), get_num_threads() + 1).astype(np.int64)
    # The threshold is between these, both inclusive.
    lowest = 0
    highest = (1 << len(planes)) - 1
    step = 1
    votes = _guess(planes, quota / num_weights)
    while True:
        # ``above`` has more votes than the threshold, ``as_many`` exactly as many.
        above, as_many = _compare(planes, votes, num_weights, pruned, tied, parts)
        # The threshold is right if the last pruned weight has exactly ``votes`` votes.
        if above.sum() > quota:
            lowest = votes + 1
            votes = votes + step
        elif above.sum() + as_many.sum() < quota:
            highest = votes - 1
            votes = votes - step
        else:
            break
        # A step beyond the bracket: bisect instead.
        votes = votes if lowest <= votes <= highest else (lowest + highest) // 2
        step = 2 * step
    # Some of the tied weights are still to be pruned.
    missing = quota - int(above.sum())
    if len(sizes) == 0:
        _prune_first(tied, pruned, missing)
    elif missing:
        _prune_smallest(tied, pruned, missing, sizes, as_many, parts)
    return pruned


def _guess(planes: Planes, share: float) -> int:
    """Return the highest vote count that the given fraction of a sample of weights reaches."""
    lines = planes[:, : planes.shape[1] // LINE_WORDS * LINE_WORDS].reshape(
        len(planes), -1, LINE_WORDS
    )
    # Contiguous, because the sample is read once for each plane.
    sample = np.ascontiguousarray(lines[:, ::SAMPLE])
    votes = 0
    tied = np.full(sample.shape[1:], ALL)
    # In bits: a line of a plane has 64 weights per word.
    quota = share * sample[0].size * 64
    # Determine the threshold bit by bit, from the highest plane down.
    for plane in range(len(planes) - 1, -1, -1):
        reaching = tied & sample[plane]
        number = int(np.bitwise_count(reaching).sum())
        if number >= quota:
            votes = votes | 1 << plane
            tied = reaching
        else:
            quota = quota - number
            tied = tied ^ reaching
    return votes


@compiled(parallel=True)
def _compare(
    planes: Planes, votes: int, num_weights: int, pruned: Words, tied: Words, parts: Places
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compare all weights with a vote threshold.

    ``pruned`` gets the weights with more votes, ``tied`` those with exactly as many. The numbers of
    both are returned for each part of the words.
    """
    above = np.zeros(len(parts) - 1, np.int64)
    as_many = np.zeros(len(parts) - 1, np.int64)
    for part in prange(len(above)):
        for first in range(parts[part], parts[part + 1], TILE):
            stop = min(first + TILE, parts[part + 1])
            more, equal = _compare_tile(
                planes, votes, num_weights, pruned[first:stop], tied[first:stop], first
            )
            above[part] += more
            as_many[part] += equal
    return above, as_many


@compiled()
def _compare_tile(
    planes: Planes, votes: int, num_weights: int, more: Words, equal: Words, first: int
) -> tuple[int, int]:
    # All weights are tied before the first plane; padding bits are not.
    for word in range(len(equal)):
        more[word] = 0
        equal[word] = _weights_of(first + word, num_weights)
    # Compare the counts with ``votes`` bit by bit, from the highest plane down.
    for plane in range(len(planes) - 1, -1, -1):
        bits = planes[plane, first : first + len(equal)]
        # If the threshold has the bit, weights without it fall below and are dropped.
        if votes >> plane & 1:
            for word in range(len(equal)):
                equal[word] &= bits[word]
        else:
            # Otherwise weights that have it lie above.
            for word in range(len(equal)):
                more[word] |= equal[word] & bits[word]
                equal[word] &= ~bits[word]
    above = 0
    as_many = 0
    for word in range(len(equal)):
        above += int(popcount(more[word]))
        as_many += int(popcount(equal[word]))
    return above, as_many


@compiled(inline="always")
def lower_bits(sizes: Sizes) -> np.int64:
    """Return the mask of a size's bits without the upper one."""
    return np.int64(0x7FFFFFFF) if sizes.itemsize == 4 else np.int64(0x7FFF)


@compiled(inline="always")
def _weights_of(word: int, num_weights: int) -> np.uint64:
    """Return a word in which the bits that belong to weights are set."""
    beyond = (word + 1) * 64 - num_weights
    if beyond <= 0:
        return ALL
    return ALL >> np.uint64(beyond) if beyond < 64 else np.uint64(0)


def _prune_smallest(
    tied: Words,
    pruned: Words,
    quota: int,
    sizes: Sizes,
    as_many: NDArray[np.int64],
    parts: NDArray[np.int64],
) -> None:
    """Prune the ``quota`` smallest of the tied weights.

    A histogram of the sizes finds the bin of the last pruned weight. All weights of lower bins are
    pruned, and only those of this bin are compared. If there are few ties, they are treated as one
    bin, so that their sizes, which are scattered in memory, are read once.
    """
    # 1. Few ties: one bin for all.
    if as_many.sum() * FEW <= len(sizes):
        places = np.empty(as_many.sum(), np.int64)
        keys = np.empty(as_many.sum(), np.uint32)
        _set_aside(tied, sizes, np.concatenate(([0], np.cumsum(as_many))), places, keys, parts)
        _prune_rest(pruned, places, keys, quota)
        return
    # 2. Many ties: a histogram of the sizes.
    # The upper 15 of the bits that count.
    shift = 8 * sizes.itemsize - 16
    counts = _count_sizes(tied, sizes, shift, parts)
    below = np.cumsum(counts.sum(axis=0))
    # The bin with the last pruned weight.
    digit = int(np.searchsorted(below, quota))
    # Each part writes its keys of the bin to a range of its own, so the order is fixed.
    starts = np.concatenate(([0], np.cumsum(counts[:, digit])))
    places = np.empty(starts[-1], np.int64)
    keys = np.empty(starts[-1], np.uint32)
    _prune_below(tied, pruned, sizes, shift, digit, starts, places, keys, parts)
    _prune_rest(pruned, places, keys, quota - (int(below[digit - 1]) if digit else 0))


@compiled(parallel=True)
def _set_aside(
    tied: Words, sizes: Sizes, starts: Places, places: Places, keys: Keys, parts: Places
) -> None:
    """Write the indices of the tied weights, in order, and their sizes.

    There are two loops, so that many memory reads are in flight at the same time.
    """
    low = lower_bits(sizes)
    # 16-bit sizes are moved up, because ``threshold_of`` begins with the highest bits.
    up = 32 - 8 * sizes.itemsize
    for part in prange(len(parts) - 1):
        position = starts[part]
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                places[position] = word * 64 + np.int64(lowest_bit(rest))
                # Clears the lowest set bit.
                rest &= rest - ONE
                position += 1
        for tie in range(starts[part], starts[part + 1]):
            keys[tie] = (np.int64(sizes[places[tie]]) & low) << up


@compiled(parallel=True)
def _count_sizes(
    tied: Words, sizes: Sizes, shift: int, parts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a histogram of the tied weights' sizes for each part of the words.

    The lower ``shift`` bits of the sizes are dropped.
    """
    low = lower_bits(sizes)
    counts = np.zeros((len(parts) - 1, 1 << 15), np.int64)
    for part in prange(len(counts)):
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                place = word * 64 + int(lowest_bit(rest))
                rest &= rest - ONE
                counts[part, (np.int64(sizes[place]) & low) >> shift] += 1
    return counts


@compiled(parallel=True)
def _prune_below(
    tied: Words,
    pruned: Words,
    sizes: Sizes,
    shift: int,
    digit: int,
    starts: Places,
    places: Places,
    keys: Keys,
    parts: Places,
) -> None:
    """Prune the tied weights with sizes below a bin, and copy those in the bin, in order."""
    low = lower_bits(sizes)
    below = (1 << shift) - 1
    for part in prange(len(parts) - 1):
        position = starts[part]
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                lowest = lowest_bit(rest)
                place = word * 64 + np.int64(lowest)
                rest &= rest - ONE
                size = np.int64(sizes[place]) & low
                # No other thread writes to this word: parts are ranges of words.
                if size >> shift < digit:
                    pruned[word] |= ONE << lowest
                elif size >> shift == digit:
                    places[position] = place
                    keys[position] = size & below
                    position += 1


@compiled()
def _prune_rest(pruned: Words, places: Places, keys: Keys, quota: int) -> None:
    """Prune the ``quota`` smallest of some weights."""
    threshold, ties = threshold_of(keys, quota, np.empty_like(keys))
    for position in range(len(keys)):
        # Arithmetic instead of a branch, which would be mispredicted half of the time.
        chosen = np.uint64(keys[position] < threshold)
        if keys[position] == threshold and ties > 0:
            chosen = ONE
            ties -= 1
        pruned[places[position] >> 6] |= chosen << np.uint64(places[position] & 63)


@compiled()
def _prune_first(tied: Words, pruned: Words, quota: int) -> None:
    """Prune the first ``quota`` of the tied weights."""
    for word in range(len(tied)):
        rest = tied[word]
        # The whole word is pruned, so it need not be taken apart.
        if quota >= popcount(rest):
            pruned[word] |= rest
            quota -= int(popcount(rest))
            continue
        while quota > 0:
            # Lowest set bit: of equal votes the lower index is pruned first.
            lowest = rest & (~rest + ONE)
            pruned[word] |= lowest
            rest ^= lowest
            quota -= 1
        return


def most_voted_in_rows(planes: Planes, shape: tuple[int, int], quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted weights of every row."""
    pruned = np.zeros(planes.shape[1], np.uint64)
    _prune_rows(planes, parts_of_rows(shape), shape[1], quota, sizes, pruned)
    return pruned


def parts_of_rows(shape: tuple[int, int]) -> Places:
    """Return the first row of each thread's part, and the end.

    A part begins at the start of a word, so that no two threads write to the same word.
    """
    rows, columns = shape
    # Fewest rows whose bits fill whole words.
    aligned = 64 // math.gcd(columns, 64)
    return np.minimum(
        np.linspace(0, -(-rows // aligned), get_num_threads() + 1).astype(np.int64) * aligned, rows
    )


@compiled(parallel=True)
def _prune_rows(
    planes: Planes, parts: Places, columns: int, quota: int, sizes: Sizes, pruned: Words
) -> None:
    for part in prange(len(parts) - 1):
        tied = np.empty(columns // 64 + 2, np.uint64)
        keys = np.empty(columns, np.uint64)
        for row in range(parts[part], parts[part + 1]):
            # First and last word of the row; both can hold bits of other rows.
            first = row * columns >> 6
            last = (row + 1) * columns - 1 >> 6
            words = last - first + 1
            # Bits of other rows in these words are cleared.
            for word in range(words):
                tied[word] = ALL
            tied[0] = ALL << np.uint64(row * columns & 63)
            tied[words - 1] &= ALL >> np.uint64(63 - ((row + 1) * columns - 1 & 63))
            missing = _descend(planes, first, tied[:words], pruned, quota)
            if missing and len(sizes):
                _prune_smallest_in_row(tied[:words], pruned, first, missing, sizes, keys)
            elif missing:
                _prune_first(tied[:words], pruned[first : last + 1], missing)


@compiled()
def _descend(planes: Planes, first: int, tied: Words, pruned: Words, quota: int) -> int:
    """Go down the planes: prune what must be pruned, and leave in ``tied`` what may be.

    Returns the number of tied weights that must be pruned too.
    """
    for plane in range(len(planes) - 1, -1, -1):
        # Tied weights with this bit have more votes than those without.
        above = 0
        for word in range(len(tied)):
            above += int(popcount(tied[word] & planes[plane, first + word]))
        # If all of them fit into the quota they are pruned; otherwise the others are out.
        take = above <= quota
        if take:
            quota -= above
        for word in range(len(tied)):
            both = tied[word] & planes[plane, first + word]
            if take:
                pruned[first + word] |= both
                tied[word] ^= both
            else:
                tied[word] = both
    return quota


@compiled()
def nth_lowest(keys: Words, place: int) -> np.uint64:
    """Return the key at an index of the sorted keys, by Hoare's selection.

    All keys are different; they are reordered.
    """
    first = 0
    last = len(keys) - 1
    while first < last:
        # Values are all different, so the scans stop at the pivot.
        pivot = keys[(first + last) >> 1]
        left = first
        right = last
        while left <= right:
            while keys[left] < pivot:
                left += 1
            while keys[right] > pivot:
                right -= 1
            if left <= right:
                keys[left], keys[right] = keys[right], keys[left]
                left += 1
                right -= 1
        if place <= right:
            last = right
        elif place >= left:
            first = left
        else:
            break
    return keys[place]


@compiled()
def _prune_smallest_in_row(
    tied: Words, pruned: Words, first: int, quota: int, sizes: Sizes, keys: Words
) -> None:
    """Prune the smallest of the tied weights of a row; its bits begin at word ``first``."""
    low = lower_bits(sizes)
    num_keys = 0
    for word in range(len(tied)):
        rest = tied[word]
        while rest:
            place = word * 64 + int(lowest_bit(rest))
            rest &= rest - ONE
            # Size first, then index: all keys differ, and ties go to the lower index.
            keys[num_keys] = (np.int64(sizes[first * 64 + place]) & low) << 32 | place
            num_keys += 1
    # Exactly ``quota`` keys are at most ``last``.
    last = nth_lowest(keys[:num_keys], quota - 1)
    for key in keys[:num_keys]:
        if key <= last:
            place = int(key & np.uint64(0xFFFFFFFF))
            pruned[first + (place >> 6)] |= ONE << np.uint64(place & 63)


@compiled(inline="always")
def _votes_at(planes: Planes, place: int) -> int:
    """Return the number of votes for one weight."""
    votes = 0
    word = place >> 6
    bit = np.uint64(place & 63)
    for plane in range(len(planes)):
        votes |= int(planes[plane, word] >> bit & ONE) << plane
    return votes


def most_voted_in_pattern(
    planes: Planes, shape: tuple[int, int], size: int, quota: int, sizes: Sizes
) -> Words:
    """Prune the ``quota`` most voted of each ``size`` consecutive weights of a row."""
    prune_mask = np.zeros(shape, np.bool_)
    _prune_pattern(planes, size, quota, sizes, prune_mask)
    return pack(prune_mask)


@compiled(parallel=True)
def _prune_pattern(
    planes: Planes, size: int, quota: int, sizes: Sizes, prune_mask: NDArray[np.bool_]
) -> None:
    rows, columns = prune_mask.shape
    low = lower_bits(sizes)
    for row in prange(rows):
        keys = np.empty(size, np.int64)
        for first in range(0, columns, size):
            for place in range(size):
                at = row * columns + first + place
                key = np.int64(sizes[at]) & low if len(sizes) else np.int64(0)
                # More votes give a lower key; sizes have at most 31 bits, so they never reach the
                # votes.
                keys[place] = key - (np.int64(_votes_at(planes, at)) << 31)
            for place in range(size):
                before = 0
                for other in range(size):
                    before += keys[other] < keys[place] or (
                        keys[other] == keys[place] and other < place
                    )
                prune_mask[row, first + place] = before < quota


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
    # Rows are padded to a multiple of 8 for ``_count_in_columns``; padded rows have no bits.
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
    # Number of weights still to be pruned, per column.
    missing = np.full(WIDTH, quota)
    tied = np.zeros_like(pruned)
    bits = np.zeros_like(pruned)
    for word in range(LINE_WORDS):
        # Bits right of the matrix belong to the next row and are never tied.
        beyond = first + 64 * (word + 1) - columns
        in_matrix = ALL >> np.uint64(max(beyond, 0)) if beyond < 64 else np.uint64(0)
        for row in range(rows):
            tied[row, word] = in_matrix
    # As in ``_descend``, for 512 columns at once: ``take`` decides for each column.
    for plane in range(len(planes) - 1, -1, -1):
        for row in range(rows):
            _read_line(planes[plane], row * columns + first, tied[row], bits[row])
        take = _columns_to_take(bits, missing)
        for row in range(rows):
            for word in range(LINE_WORDS):
                both = bits[row, word]
                pruned[row, word] |= both & take[word]
                # Taken columns keep the weights without the bit, others those with it.
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
    # Bits of the largest possible count.
    levels = 3
    while len(bits) >> levels:
        levels += 1
    counter = np.zeros((levels, LINE_WORDS), np.uint64)
    carry = np.empty(LINE_WORDS, np.uint64)
    # Full adders turn eight rows into one carry of weight 8.
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
        # The carry ripples on; mostly it ends after a plane or two.
        for plane in range(3, levels):
            left = np.uint64(0)
            for lane in range(LINE_WORDS):
                both = counter[plane, lane] & carry[lane]
                counter[plane, lane] ^= carry[lane]
                carry[lane] = both
                left |= both
            if left == 0:
                break
    # Read the counters back, one number per column.
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
    # A counting sort: each column's tied weights get a range of ``keys``.
    starts = np.zeros(WIDTH + 1, np.int64)
    numbers = _count_in_columns(tied)
    for column in range(WIDTH):
        starts[column + 1] = starts[column] + numbers[column]
    keys = np.empty(starts[-1], np.uint64)
    positions = starts[:-1].copy()
    for row in range(len(tied)):
        for word in range(LINE_WORDS):
            rest = tied[row, word]
            while rest:
                column = word * 64 + int(lowest_bit(rest))
                rest &= rest - ONE
                size = np.int64(sizes[row * columns + first + column]) & low if len(sizes) else 0
                # Size first, then row: all keys of a column differ.
                keys[positions[column]] = size << 32 | row
                positions[column] += 1
    for column in range(min(WIDTH, columns - first)):
        if missing[column] == 0:
            continue
        column_keys = keys[starts[column] : starts[column + 1]]
        last = nth_lowest(column_keys, missing[column] - 1)
        for key in column_keys:
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
                # The word can straddle two words of the mask; a shift by 64 bits is undefined.
                if shift and bits >> np.uint64(64) - shift:
                    pruned[(place >> 6) + 1] |= bits >> np.uint64(64) - shift
