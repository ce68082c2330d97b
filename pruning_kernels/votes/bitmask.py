"""Packed masks: one bit per weight, row-major, little-endian in 64-bit words.

Bit ``i % 64`` of word ``i // 64`` belongs to weight ``i``. Rows follow each other without padding,
and the unused bits of the last word are zero.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

LINE_WORDS = 8
"""Number of words of a cache line."""


def num_words(num_weights: int) -> int:
    """Return the number of 64-bit words that hold ``num_weights`` bits."""
    return -(-num_weights // 64)


def stack_of_masks(num_masks: int, words: int) -> NDArray[np.uint64]:
    """Return uninitialised memory for masks that are read together: (num_masks, words) uint64.

    The sizes of matrices are often powers of two or nearly so. The rows of an ordinary array then
    map to the same cache sets, which hold a few lines, and evict each other while their words are
    added up. Here they map to different sets.
    """
    # Rows are a multiple of 64 lines (4 KiB) plus nine lines apart, because a row has nine lines in
    # the cache while it is read.
    lines = -(-words // (64 * LINE_WORDS)) * 64 + 9
    return np.empty((num_masks, lines * LINE_WORDS), np.uint64)[:, :words]


def planes_for(num_planes: int, words: int) -> NDArray[np.uint64]:
    """Return zeroed planes, (num_planes, words rounded up to whole lines), uint64.

    Every row is aligned to a cache line.
    """
    words = -(-words // LINE_WORDS) * LINE_WORDS
    # One line of slack, so that the first row can begin at a line's start.
    room = np.zeros(num_planes * words + LINE_WORDS, np.uint64)
    # Number of words up to the next cache line.
    first = -room.ctypes.data // 8 % LINE_WORDS
    return room[first : first + num_planes * words].reshape(num_planes, words)


def pack(mask: NDArray[np.bool_]) -> Words:
    """Pack a boolean array of any shape into ``(num_words(mask.size),)`` uint64."""
    packed = np.zeros(num_words(mask.size) * 8, dtype=np.uint8)
    bits = np.packbits(mask.reshape(-1), bitorder="little")
    packed[: bits.size] = bits
    # "<u8" fixes the byte order on any machine; the second conversion is free on most.
    return packed.view("<u8").astype(np.uint64, copy=False)


def unpack(words: Words, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Invert ``pack``: return a boolean array of the given shape.

    Raises
    ------
    ValueError
        The number of words does not match the shape.
    """
    size = int(np.prod(shape, dtype=np.int64))
    # Bits of a mask that a client sent: its length is checked before use.
    if words.shape != (num_words(size),):
        raise ValueError(f"a mask of {size} weights has {num_words(size)} words, not {words.shape}")
    little = words.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(little, count=size, bitorder="little").view(np.bool_).reshape(shape)


def count(words: Words) -> int:
    """Return the number of set bits."""
    return int(np.bitwise_count(words).sum(dtype=np.int64))


def count_rows(words: Words, shape: tuple[int, int]) -> NDArray[np.int64]:
    """Return the number of set bits in each row of a packed matrix, ``(rows,)``."""
    rows, columns = shape
    # Whole words per row, so no unpacking is needed.
    if columns % 64 == 0:
        return np.bitwise_count(words.reshape(rows, columns // 64)).sum(axis=1, dtype=np.int64)
    return unpack(words, shape).sum(axis=1, dtype=np.int64)


def has_clean_padding(words: Words, num_weights: int) -> bool:
    """Return whether the bits after the last weight are zero, as ``pack`` leaves them."""
    # Set padding bits would count as votes for weights that do not exist.
    used = num_weights % 64
    return used == 0 or int(words[-1]) >> used == 0
