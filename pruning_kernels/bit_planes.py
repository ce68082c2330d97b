"""Votes as bit planes, in numba: plane ``p`` has bit ``i`` set if the votes for weight ``i`` have ``2**p`` in them.

Votes are counted by carry-save addition of whole words: eight masks become four planes by seven full adders, and no mask
is ever unpacked. The most voted weights are found on the planes too, from the upper to the lower: what has the bit of the
threshold stays in question, what has a bit that the threshold lacks is pruned (a radix select with a radix of two).

``planes`` are (number of planes, words) uint64, masks and results flat words as in ``bitmask``. ``sizes`` decide among
equally voted weights: unsigned integers, (weights,), whose upper bit is not looked at, so that the bits of a float are its
magnitude; an empty array leaves the index to decide.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, prange, types
from numba.core import cgutils
from numpy.typing import NDArray

from pruning_kernels.bitmask import Words, pack
from pruning_kernels.compiled import compiled, instruction
from pruning_kernels.lowest import threshold_of

TILE = 1024
"""Words that are counted together: what all planes have of them fits the second cache."""
LANES = 8
"""Words of a vector instruction."""
PREFETCH = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
AHEAD = 64
"""How many words before they are needed masks are asked from memory."""
ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)

Sizes = NDArray[np.unsignedinteger]
Places = NDArray[np.int64]
Keys = NDArray[np.uint32]


@instruction
def popcount(typing: Any, word: Any) -> Any:
    """Number of set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@instruction
def _lowest_bit(typing: Any, word: Any) -> Any:
    """Place of the lowest set bit of a uint64 that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _adder(group: int) -> Any:
    """An intrinsic that adds ``group`` masks, a power of two, to the lowest planes, ``LANES`` words at once.

    It is written as vector instructions, because a compiler that must assume that arrays overlap does not find them.
    """
    levels = group.bit_length() - 1

    @instruction
    def add(typing: Any, masks: Any, voter: Any, word: Any, planes: Any, carry: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            masks, voter, word, planes, carry, place = arguments
            vector, byte = ir.VectorType(ir.IntType(64), LANES).as_pointer(), ir.IntType(8).as_pointer()
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], PREFETCH)

            def at(which: int, array: Any, row: Any, column: Any, pointer: Any = vector) -> Any:
                made = context.make_array(signature.args[which])(context, builder, array)
                index = (column,) if row is None else (row, column)
                return builder.bitcast(cgutils.get_item_pointer(context, builder, signature.args[which], made, index), pointer)

            def mask(number: int) -> Any:
                row = builder.add(voter, ir.Constant(ir.IntType(64), number))
                ahead = at(0, masks, row, builder.add(word, ir.Constant(ir.IntType(64), AHEAD)), byte)
                builder.call(prefetch, [ahead, *(ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))])
                return builder.load(at(0, masks, row, word), align=8)

            def carried(first: int, level: int) -> Any:
                """Add ``2 ** (level + 1)`` masks to the planes up to ``level``; their carry."""
                half = 1 << level
                a, b = (carried(at, level - 1) if level else mask(at) for at in (first, first + half))
                c = sums[level]
                differ = builder.xor(a, b)
                sums[level] = builder.xor(differ, c)
                return builder.or_(builder.and_(a, b), builder.and_(differ, c))

            lowest = [at(3, planes, ir.Constant(ir.IntType(64), level), place) for level in range(levels)]
            sums = [builder.load(pointer, align=8) for pointer in lowest]
            builder.store(carried(0, levels - 1), at(4, carry, None, place), align=8)
            for pointer, value in zip(lowest, sums, strict=True):
                builder.store(value, pointer, align=8)
            return context.get_dummy_value()

        return types.void(masks, types.int64, types.int64, planes, carry, types.int64), generate

    return add


_add_32, _add_8 = _adder(32), _adder(8)


@instruction
def _write_past_cache(typing: Any, planes: Any, plane: Any, word: Any, value: Any) -> Any:
    """Write a word without reading its line first, as it isn't read again soon; ``_finish_writing`` ends a series."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes, plane, word, value = arguments
        made = context.make_array(signature.args[0])(context, builder, planes)
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], made, (plane, word))
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        builder.store(value, pointer, align=8).set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(planes, types.int64, types.int64, types.uint64), generate


@instruction
def _finish_writing(typing: Any) -> Any:
    """Let every thread see what was written past the cache before anything that comes after."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@compiled(parallel=True)
def count_votes(masks: NDArray[np.uint64], planes: NDArray[np.uint64]) -> None:
    """Add up masks, (voters, words); ``planes`` has as many rows as the number of voters has bits.

    The words of a row must lie side by side, in both; rows may be any distance apart.
    """
    voters, words = masks.shape
    by_32, by_8 = voters // 32 * 32, voters // 8 * 8
    for tile in prange(-(-words // TILE)):
        first, stop = tile * TILE, min((tile + 1) * TILE, words)
        size, by_lanes = stop - first, (stop - first) // LANES * LANES
        sums, carry = np.zeros((len(planes), size), np.uint64), np.empty(size, np.uint64)
        for voter in range(0, by_32, 32):
            for word in range(0, by_lanes, LANES):
                _add_32(masks, voter, first + word, sums, carry, word)
            for plane in range(5, len(planes)):
                _half_add(sums[plane, :by_lanes], carry)
        for voter in range(by_32, by_8, 8):
            for word in range(0, by_lanes, LANES):
                _add_8(masks, voter, first + word, sums, carry, word)
            for plane in range(3, len(planes)):
                _half_add(sums[plane, :by_lanes], carry)
        for voter in range(by_8 if by_lanes == size else 0, voters):
            start = 0 if voter >= by_8 else by_lanes
            carry[start:] = masks[voter, first + start : stop]
            for plane in range(len(planes)):
                _half_add(sums[plane, start:], carry[start:])
        for plane in range(len(planes)):
            for word in range(size):
                _write_past_cache(planes, plane, first + word, sums[plane, word])
        _finish_writing()


@compiled()
def _half_add(plane: Words, carry: Words) -> None:
    """Add ``carry`` to a plane; what is carried on replaces it."""
    for word in range(len(plane)):
        a, b = plane[word], carry[word]
        plane[word] = a ^ b
        carry[word] = a & b


def most_voted_in_layer(planes: NDArray[np.uint64], num_weights: int, quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of all weights."""
    pruned = np.zeros(planes.shape[1], np.uint64)
    tied = np.full(planes.shape[1], ALL)
    if num_weights % 64:
        tied[-1] = (1 << num_weights % 64) - 1
    parts = np.linspace(0, len(tied), get_num_threads() + 1).astype(np.int64)
    above = int(_count_common(tied, planes[-1], parts).sum())
    for plane, below in zip(planes[::-1], [*planes[-2::-1], None], strict=True):
        take = above <= quota
        quota -= above if take else 0
        rest = plane if below is None else below
        above = int(_descend(tied, plane, take, pruned, rest, parts).sum())
    if len(sizes) == 0:
        _prune_first(tied, pruned, quota)
    elif quota:
        _prune_smallest(tied, pruned, quota, sizes, parts)
    return pruned


@compiled(parallel=True)
def _count_common(tied: Words, plane: Words, parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the tied weights have the plane's bit, for each part of the words."""
    counts = np.zeros(len(parts) - 1, np.int64)
    for part in prange(len(counts)):
        found = 0
        for word in range(parts[part], parts[part + 1]):
            found += int(popcount(tied[word] & plane[word]))
        counts[part] = found
    return counts


@compiled(parallel=True)
def _descend(tied: Words, plane: Words, take: bool, pruned: Words, below: Words, parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Go below a plane: prune the tied weights that have its bit (``take``), or leave only them tied.

    Returns how many of the weights that stay tied have the bit of the plane ``below``, for each part of the words.
    """
    counts = np.zeros(len(parts) - 1, np.int64)
    for part in prange(len(counts)):
        found = 0
        for word in range(parts[part], parts[part + 1]):
            both = tied[word] & plane[word]
            rest = tied[word] ^ both if take else both
            if take:
                pruned[word] |= both
            tied[word] = rest
            found += int(popcount(rest & below[word]))
        counts[part] = found
    return counts


def _prune_smallest(tied: Words, pruned: Words, quota: int, sizes: Sizes, parts: NDArray[np.int64]) -> None:
    """Prune the smallest of the tied weights: at once all below the bin of the last one, then some of that bin."""
    shift = 8 * sizes.itemsize - 16
    counts = _count_sizes(tied, sizes, shift, parts)
    below = np.cumsum(counts.sum(axis=0))
    digit = int(np.searchsorted(below, quota))
    starts = np.concatenate(([0], np.cumsum(counts[:, digit])))
    places, keys = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.uint32)
    _prune_below(tied, pruned, sizes, shift, digit, starts, places, keys, parts)
    _prune_rest(pruned, places, keys, quota - (int(below[digit - 1]) if digit else 0))


@compiled(parallel=True)
def _count_sizes(tied: Words, sizes: Sizes, shift: int, parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Histogram of the upper 15 bits of the tied weights' sizes, for each part of the words."""
    counts = np.zeros((len(parts) - 1, 1 << 15), np.int64)
    for part in prange(len(counts)):
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                place = word * 64 + int(_lowest_bit(rest))
                rest &= rest - ONE
                counts[part, np.int64(sizes[place]) >> shift & 0x7FFF] += 1
    return counts


@compiled(parallel=True)
def _prune_below(
    tied: Words, pruned: Words, sizes: Sizes, shift: int, digit: int, starts: Places, places: Places, keys: Keys, parts: Places
) -> None:
    """Prune the tied weights whose sizes lie below a bin, and set those of the bin aside, in order."""
    for part in prange(len(parts) - 1):
        found = starts[part]
        for word in range(parts[part], parts[part + 1]):
            rest = tied[word]
            while rest:
                lowest = _lowest_bit(rest)
                place = word * 64 + np.int64(lowest)
                rest &= rest - ONE
                size = np.int64(sizes[place])
                upper = size >> shift & 0x7FFF
                if upper < digit:
                    pruned[word] |= ONE << lowest
                elif upper == digit:
                    places[found], keys[found] = place, size & ((0x8000 << shift) - 1)
                    found += 1


@compiled()
def _prune_rest(pruned: Words, places: Places, keys: Keys, quota: int) -> None:
    """Prune the ``quota`` smallest of some weights."""
    threshold, ties = threshold_of(keys, quota, np.empty_like(keys))
    for found in range(len(keys)):
        chosen = keys[found] < threshold
        if keys[found] == threshold and ties > 0:
            chosen = True
            ties -= 1
        if chosen:
            pruned[places[found] >> 6] |= ONE << np.uint64(places[found] & 63)


@compiled()
def _prune_first(tied: Words, pruned: Words, quota: int) -> None:
    """Prune the first ``quota`` of the tied weights."""
    for word in range(len(tied)):
        rest = tied[word]
        if quota >= popcount(rest):
            pruned[word] |= rest
            quota -= int(popcount(rest))
            continue
        while quota > 0:
            lowest = rest & (~rest + ONE)
            pruned[word] |= lowest
            rest ^= lowest
            quota -= 1
        return


def most_voted_in_rows(planes: NDArray[np.uint64], shape: tuple[int, int], quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of every row."""
    pruned = np.zeros(planes.shape[1], np.uint64)
    _prune_rows(planes, _parts_of_rows(shape), shape[1], quota, sizes, pruned)
    return pruned


def _parts_of_rows(shape: tuple[int, int]) -> Places:
    """Where each thread's rows begin, and the end: where a word does, so that no two threads write to the same one."""
    rows, columns = shape
    aligned = 64 // math.gcd(columns, 64)
    return np.minimum(np.linspace(0, -(-rows // aligned), get_num_threads() + 1).astype(np.int64) * aligned, rows)


@compiled(parallel=True)
def _prune_rows(planes: NDArray[np.uint64], parts: Places, columns: int, quota: int, sizes: Sizes, pruned: Words) -> None:
    low = np.int64(0x7FFFFFFF) if sizes.itemsize == 4 else np.int64(0x7FFF)
    for part in prange(len(parts) - 1):
        tied = np.empty(columns // 64 + 2, np.uint64)
        keys, scratch = np.empty(columns, np.uint32), np.empty(columns, np.uint32)
        places = np.empty(columns, np.int64)
        for row in range(parts[part], parts[part + 1]):
            first, last = row * columns >> 6, (row + 1) * columns - 1 >> 6
            words = last - first + 1
            tied[:words] = ALL
            tied[0] = ALL << np.uint64(row * columns & 63)
            tied[words - 1] &= ALL >> np.uint64(63 - ((row + 1) * columns - 1 & 63))
            missing = quota
            for plane in range(len(planes) - 1, -1, -1):
                above = 0
                for word in range(words):
                    above += int(popcount(tied[word] & planes[plane, first + word]))
                take = above <= missing
                if take:
                    missing -= above
                for word in range(words):
                    both = tied[word] & planes[plane, first + word]
                    if take:
                        pruned[first + word] |= both
                        tied[word] ^= both
                    else:
                        tied[word] = both
            if missing == 0:
                continue
            if len(sizes) == 0:
                _prune_first(tied[:words], pruned[first : last + 1], missing)
                continue
            found = 0
            for word in range(words):
                rest = tied[word]
                while rest:
                    place = (first + word) * 64 + int(_lowest_bit(rest))
                    rest &= rest - ONE
                    keys[found], places[found] = np.int64(sizes[place]) & low, place
                    found += 1
            threshold, ties = threshold_of(keys[:found], missing, scratch)
            for place in range(found):
                chosen = keys[place] < threshold
                if keys[place] == threshold and ties > 0:
                    chosen = True
                    ties -= 1
                if chosen:
                    pruned[places[place] >> 6] |= ONE << np.uint64(places[place] & 63)


@compiled(inline="always")
def _window(plane: Words, place: int) -> np.uint64:
    """The 64 bits from a place on; beyond the plane they are zero."""
    word, shift = place >> 6, np.uint64(place & 63)
    bits = plane[word] >> shift
    if shift and word + 1 < len(plane):
        bits |= plane[word + 1] << np.uint64(64) - shift
    return bits


@compiled(inline="always")
def _votes_at(planes: NDArray[np.uint64], place: int) -> int:
    """Votes for one weight."""
    votes, word, bit = 0, place >> 6, np.uint64(place & 63)
    for plane in range(len(planes)):
        votes |= int(planes[plane, word] >> bit & ONE) << plane
    return votes


def most_voted_in_columns(planes: NDArray[np.uint64], shape: tuple[int, int], quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of every column: 64 columns at once, each a bit of one word per row."""
    rows, columns = shape
    pruned = np.zeros(planes.shape[1], np.uint64)
    strips = np.empty((-(-columns // 64), rows), np.uint64)
    _prune_columns(planes, columns, quota, sizes, strips)
    _join_strips(strips, _parts_of_rows(shape), columns, pruned)
    return pruned


@compiled(parallel=True)
def _prune_columns(planes: NDArray[np.uint64], columns: int, quota: int, sizes: Sizes, strips: NDArray[np.uint64]) -> None:
    """Prune columns; bit ``c`` of ``strips[s, r]`` is set if the weight in row r and column ``64 * s + c`` is pruned."""
    rows = strips.shape[1]
    low = np.int64(0x7FFFFFFF) if sizes.itemsize == 4 else np.int64(0x7FFF)
    for strip in prange(len(strips)):
        width = min(64, columns - 64 * strip)
        pruned, missing = strips[strip], np.full(64, quota)
        pruned[:] = 0
        tied, bits = np.full(rows, ALL >> np.uint64(64 - width)), np.empty(rows, np.uint64)
        for plane in range(len(planes) - 1, -1, -1):
            for row in range(rows):
                bits[row] = _window(planes[plane], row * columns + 64 * strip) & tied[row]
            take = _columns_to_take(bits, missing)
            for row in range(rows):
                pruned[row] |= bits[row] & take
                tied[row] = ((tied[row] ^ bits[row]) & take) | (bits[row] & ~take)
        keys, of_rows = np.empty((width, rows), np.uint32), np.empty((width, rows), np.int32)
        found, scratch = np.zeros(width, np.int64), np.empty(rows, np.uint32)
        for row in range(rows):
            rest = tied[row]
            while rest:
                column = int(_lowest_bit(rest))
                rest &= rest - ONE
                place = row * columns + 64 * strip + column
                keys[column, found[column]] = np.int64(sizes[place]) & low if len(sizes) else 0
                of_rows[column, found[column]] = row
                found[column] += 1
        for column in range(width):
            if missing[column] == 0:
                continue
            threshold, ties = threshold_of(keys[column, : found[column]], missing[column], scratch)
            for place in range(found[column]):
                chosen = keys[column, place] < threshold
                if keys[column, place] == threshold and ties > 0:
                    chosen = True
                    ties -= 1
                if chosen:
                    pruned[of_rows[column, place]] |= ONE << np.uint64(column)


@compiled()
def _columns_to_take(bits: Words, missing: Places) -> np.uint64:
    """The columns in which no more bits are set than are ``missing``; what is set in them is subtracted from it."""
    counter = np.zeros(32, np.uint64)  # bit planes again, of the number of bits set in each column
    for word in bits:
        carry, plane = word, 0
        while carry:
            counter[plane], carry = counter[plane] ^ carry, counter[plane] & carry
            plane += 1
    take = np.uint64(0)
    for column in range(64):
        number = 0
        for plane in range(32):
            number |= int(counter[plane] >> np.uint64(column) & ONE) << plane
        if number <= missing[column]:
            missing[column] -= number
            take |= ONE << np.uint64(column)
    return take


@compiled(parallel=True)
def _join_strips(strips: NDArray[np.uint64], parts: Places, columns: int, pruned: Words) -> None:
    """Write 64 columns after the other into the rows of a flat mask."""
    for part in prange(len(parts) - 1):
        for row in range(parts[part], parts[part + 1]):
            for strip in range(len(strips)):
                place = row * columns + 64 * strip
                shift = np.uint64(place & 63)
                pruned[place >> 6] |= strips[strip, row] << shift
                if shift and strips[strip, row] >> np.uint64(64) - shift:
                    pruned[(place >> 6) + 1] |= strips[strip, row] >> np.uint64(64) - shift


def most_voted_in_pattern(planes: NDArray[np.uint64], shape: tuple[int, int], size: int, quota: int, sizes: Sizes) -> Words:
    """Prune the ``quota`` most voted of each ``size`` consecutive weights of a row."""
    prune_mask = np.zeros(shape, np.bool_)
    _prune_pattern(planes, size, quota, sizes, prune_mask)
    return pack(prune_mask)


@compiled(parallel=True)
def _prune_pattern(planes: NDArray[np.uint64], size: int, quota: int, sizes: Sizes, prune_mask: NDArray[np.bool_]) -> None:
    rows, columns = prune_mask.shape
    low = np.int64(0x7FFFFFFF) if sizes.itemsize == 4 else np.int64(0x7FFF)
    for row in prange(rows):
        keys = np.empty(size, np.int64)
        for first in range(0, columns, size):
            for place in range(size):
                at = row * columns + first + place
                key = np.int64(sizes[at]) & low if len(sizes) else np.int64(0)
                keys[place] = key - (np.int64(_votes_at(planes, at)) << 31)
            for place in range(size):
                before = 0
                for other in range(size):
                    before += keys[other] < keys[place] or (keys[other] == keys[place] and other < place)
                prune_mask[row, first + place] = before < quota
