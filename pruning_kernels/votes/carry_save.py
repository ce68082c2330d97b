"""Vote counting by carry-save addition, in numba: packed masks to bit planes.

Plane ``p`` has bit ``i`` set if the number of votes for weight ``i`` has bit ``p`` set. Masks are
not unpacked. A tree of adders turns one cache line of each of 64 masks into seven lines of planes,
in registers. More voters are added 64 at a time. Each mask is read once, and each plane is written
once with non-temporal stores. Counting takes little more time than reading the masks and writing
the planes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pruning_kernels.compiler import compiled
from pruning_kernels.votes.bitmask import LINE_WORDS, Words, stack_of_masks

GROUP = 64
"""Number of masks that are added together."""
GROUP_BITS = 7
"""Number of bits of their sum."""
TILE = 1024
"""Number of words that a thread counts at a time."""
AHEAD = 64
"""Prefetch distance in words."""
PREFETCH = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
READ_INTO_SECOND_CACHE = (0, 2, 1)
"""Arguments of the prefetch: a read into the second-level cache.

``AHEAD`` words of 64 masks would fill most of the first-level cache.
"""

Planes = NDArray[np.uint64]
Value = Any
"""A value of the generated code."""
LINE = ir.VectorType(ir.IntType(64), LINE_WORDS)
TO_LINE = LINE.as_pointer()
TO_BYTE = ir.IntType(8).as_pointer()
number_of = partial(ir.Constant, ir.IntType(64))


def _reader(builder: Any, rows: Sequence[Value], voters: Value) -> Callable[[int], Value]:
    """Return a function that generates the loading of a mask's line.

    Parameters
    ----------
    builder : builder of the code
    rows : pointers to the same line of each mask
    voters : number of masks that exist; further ones are zero
    """
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [TO_BYTE], PREFETCH)
    hints = [ir.Constant(ir.IntType(32), value) for value in READ_INTO_SECOND_CACHE]
    zeros = builder.bitcast(cgutils.alloca_once(builder, LINE, zfill=True), TO_BYTE)

    def mask(number: int) -> Value:
        # Masks after the last voter are read from a line of zeros, without a branch.
        there = builder.icmp_signed("<", number_of(number), voters)
        row = builder.select(there, rows[number], zeros)
        builder.call(prefetch, [builder.gep(row, [number_of(8 * AHEAD)]), *hints])
        return builder.load(builder.bitcast(row, TO_LINE), align=8)

    return mask


def _sum_of_masks(builder: Any, mask: Callable[[int], Value], levels: int) -> list[Value]:
    """Generate the addition of ``2 ** levels`` masks and return its ``levels + 1`` planes.

    The recursion adds all masks as a balanced tree, which needs few registers.
    """
    sums: list[Value] = [None] * levels

    def carried(first: int, level: int) -> Value:
        """Add ``2 ** (level + 1)`` masks to the sums up to ``level``; return the carry."""
        a, b = (
            carried(at, level - 1) if level else mask(at) for at in (first, first + (1 << level))
        )
        c = sums[level]
        # Half adder for the first masks of a level, full adder if the level has a sum already.
        differ = builder.xor(a, b)
        if c is None:
            sums[level] = differ
            return builder.and_(a, b)
        sums[level] = builder.xor(differ, c)
        return builder.or_(builder.and_(a, b), builder.and_(differ, c))

    carry = carried(0, levels - 1)
    return [*sums, carry]


def _adder(group: int) -> Any:
    """Return an intrinsic that adds a line of ``group`` masks, a power of two.

    The sums are (at least ``log2(group) + 1``, line). Masks after the last voter count as zero, so
    any smaller number of masks can be added too. The function emits vector instructions itself,
    because the compiler must assume that the arrays overlap and would not vectorise a loop.
    """

    @intrinsic
    def add(typing: Any, masks: Any, voter: Any, word: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            masks, target = (
                context.make_array(signature.args[which])(context, builder, arguments[which])
                for which in (0, 3)
            )

            def at(which: int, array: Any, row: Value, column: Value) -> Value:
                return cgutils.get_item_pointer(
                    context, builder, signature.args[which], array, (row, column)
                )

            # Number of voters from this one on, which decides the rows that count as zero.
            voters = builder.sub(builder.extract_value(masks.shape, 0), arguments[1])
            to_next = builder.extract_value(masks.strides, 0)
            rows = [builder.bitcast(at(0, masks, *arguments[1:3]), TO_BYTE)]
            for _ in range(group - 1):
                rows.append(builder.gep(rows[-1], [to_next]))
            mask = _reader(builder, rows, voters)
            for level, plane in enumerate(_sum_of_masks(builder, mask, group.bit_length() - 1)):
                place = builder.bitcast(at(3, target, number_of(level), number_of(0)), TO_LINE)
                builder.store(plane, place, align=8)
            return context.get_dummy_value()

        return types.void(masks, types.int64, types.int64, sums), generate

    return add


_add_16 = _adder(16)
_add_64 = _adder(GROUP)


def _writer(past_cache: bool) -> Any:
    """Return an intrinsic that copies a line of a plane to its place.

    With ``past_cache`` it uses a non-temporal store, and the place must be aligned to a line.
    """

    @intrinsic
    def write(typing: Any, planes: Any, plane: Any, word: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def at(which: int, column: Any) -> Any:
                array = context.make_array(signature.args[which])(
                    context, builder, arguments[which]
                )
                index = (arguments[1], column)
                pointer = cgutils.get_item_pointer(
                    context, builder, signature.args[which], array, index
                )
                return builder.bitcast(pointer, TO_LINE)

            value = builder.load(at(3, ir.Constant(ir.IntType(64), 0)), align=8)
            store = builder.store(
                value, at(0, arguments[2]), align=8 * LINE_WORDS if past_cache else 8
            )
            if past_cache:
                store.set_metadata(
                    "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                )
            return context.get_dummy_value()

        return types.void(planes, types.int64, types.int64, sums), generate

    return write


_write = _writer(False)
_write_past_cache = _writer(True)


@intrinsic
def _finish_writing(typing: Any) -> Any:
    """Fence that makes non-temporal stores visible to all threads before later operations."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def count_votes(masks: NDArray[np.uint64], planes: Planes) -> None:
    """Count the votes of masks, (voters, words), into ``planes``.

    ``planes``, (bits of the number of voters, words), is overwritten. In both arrays the words of a
    row are contiguous, and rows can have any distance. Counting is fastest if every row of the
    planes is aligned to 64 bytes (``bitmask.planes_for``) and the rows of masks are spread over the
    cache (``bitmask.stack_of_masks``).
    """
    voters, words = masks.shape
    whole_words = words // LINE_WORDS * LINE_WORDS
    # Non-temporal stores of a whole vector need aligned places.
    in_lines = all(
        place % (8 * LINE_WORDS) == 0 for place in (planes.ctypes.data, *planes.strides[:-1])
    )
    _count(masks[:, :whole_words], planes[:, :whole_words], in_lines)
    if whole_words < words:
        # The kernel counts whole lines, so the last words are padded to one.
        tail = stack_of_masks(voters, LINE_WORDS)
        tail[:, : words - whole_words], tail[:, words - whole_words :] = masks[:, whole_words:], 0
        counted = stack_of_masks(len(planes), LINE_WORDS)
        _count(tail, counted, False)
        planes[:, whole_words:] = counted[:, : words - whole_words]


@compiled(parallel=True)
def _count(masks: NDArray[np.uint64], planes: Planes, in_lines: bool) -> None:
    """Count the votes of whole lines."""
    words = masks.shape[1]
    for tile in prange(-(-words // TILE)):
        _count_tile(masks, planes, in_lines, tile * TILE, min((tile + 1) * TILE, words))


@compiled()
def _count_tile(
    masks: NDArray[np.uint64], planes: Planes, in_lines: bool, first: int, stop: int
) -> None:
    group = np.zeros((GROUP_BITS, LINE_WORDS), np.uint64)
    carry = np.zeros(LINE_WORDS, np.uint64)
    sums = np.zeros((max(len(planes), GROUP_BITS), LINE_WORDS), np.uint64)
    for word in range(first, stop, LINE_WORDS):
        for voter in range(0, len(masks), GROUP):
            bits = _add_group(masks, voter, word, group)
            # The first group overwrites, later ones are added.
            if voter == 0:
                for plane in range(len(sums)):
                    for lane in range(LINE_WORDS):
                        sums[plane, lane] = group[plane, lane] if plane < bits else np.uint64(0)
            else:
                _add_number(sums, group, bits, carry)
        for plane in range(len(planes)):
            if in_lines:
                _write_past_cache(planes, plane, word, sums)
            else:
                _write(planes, plane, word, sums)
    # Before the thread ends, since other threads read the planes next.
    _finish_writing()


@compiled(inline="always")
def _add_group(masks: NDArray[np.uint64], voter: int, word: int, group: Planes) -> int:
    """Add up to 64 masks, starting with ``voter``; return the number of bits of their sum."""
    if len(masks) - voter <= 16:
        _add_16(masks, voter, word, group)
        bits = 5
    else:
        _add_64(masks, voter, word, group)
        bits = GROUP_BITS
    # 16 masks sum to at most 16, five bits; 64 to seven.
    return bits


@compiled(inline="always")
def _add_number(sums: Planes, group: Planes, bits: int, carry: Words) -> None:
    """Add the sum of a group, which has ``bits`` bits, to the previous sums."""
    for lane in range(LINE_WORDS):
        carry[lane] = 0
    for plane in range(len(sums)):
        for lane in range(LINE_WORDS):
            a = sums[plane, lane]
            # Planes beyond the group's bits still take the carry.
            b = group[plane, lane] if plane < bits else np.uint64(0)
            sums[plane, lane] = a ^ b ^ carry[lane]
            carry[lane] = a & b | (a ^ b) & carry[lane]
