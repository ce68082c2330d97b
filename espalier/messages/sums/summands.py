"""Summands: vectors of modular integers, of which a server may learn only the sum.

A vector has ``length`` numbers modulo ``2^bits``. It travels as a flat tensor of 64-bit words,
little-endian: bit ``k`` of number ``i`` is bit ``(i * bits + k) % 64`` of word
``(i * bits + k) // 64``. Numbers follow each other without padding, so a number may lie in two
words, and votes of eight clients take four bits each. The unused bits of the last word are zero.

Numbers of 128 bits are integers too, of two words: addition carries from the low to the high word.
Two words that are added each for itself would tell more than the sum: how often the low words of
single clients were carried over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from espalier.messages.tensor_blobs import TensorSpec

Words = NDArray[np.uint64]
"""Packed numbers: flat, uint64."""
Numbers = NDArray[np.uint64]
"""Unpacked numbers: (length,) uint64; with 128 bits (2, length), low words, then high words."""

WORD_BITS = 64
WIDE_BITS = 128
"""Number of bits of a number of two words."""
CHUNK_WORDS = 1 << 15
"""Words that are added at once: all operands of a chunk fit into a core's cache."""


@dataclass(frozen=True)
class SumSpec:
    """A vector of ``length`` integers modulo ``2^bits``.

    ``bits`` is 1 to 64, or 128. The sum of all clients' numbers must be below ``2^bits``, or within
    the range of two's complement if numbers have a sign.
    """

    length: int
    bits: int

    def __post_init__(self) -> None:
        if self.length < 0 or not (1 <= self.bits <= WORD_BITS or self.bits == WIDE_BITS):
            raise ValueError(f"no vector of {self.length} numbers of {self.bits} bits")

    @property
    def num_words(self) -> int:
        """Number of 64-bit words of the packed vector."""
        return -(-self.length * self.bits // WORD_BITS)

    @property
    def tensor(self) -> TensorSpec:
        """Spec of the tensor that a message carries."""
        return TensorSpec("U64", (self.num_words,))


SumSpecs = Mapping[str, Mapping[str, SumSpec]]
"""Specs of the summands of a reply, by blob key and tensor name."""


def bits_for(most: int) -> int:
    """Return the fewest bits of a sum of at most ``most``; for votes, the number of clients."""
    return max(1, most.bit_length())


def pack(numbers: Numbers, spec: SumSpec) -> Words:
    """Return numbers, each taken modulo ``2^bits``, as words.

    Raises ValueError if the shape is not ``(length,)``, or ``(2, length)`` with 128 bits.
    """
    is_wide = spec.bits == WIDE_BITS
    if numbers.shape != ((2, spec.length) if is_wide else (spec.length,)):
        raise ValueError(f"{numbers.shape} is not the shape of {spec}")
    if is_wide:
        return np.ascontiguousarray(numbers.T).reshape(-1)
    if spec.bits == WORD_BITS:
        return numbers.copy()
    numbers = numbers & _ones(spec.bits)
    if WORD_BITS % spec.bits == 0 and spec.bits >= 8:
        return _as_words(numbers.astype(f"<u{spec.bits // 8}"), spec)
    per_group, words_per_group = _group(spec.bits)
    groups = -(-spec.length // per_group)
    padded = np.zeros(groups * per_group, np.uint64)
    padded[: spec.length] = numbers
    columns = padded.reshape(groups, per_group)
    packed = np.zeros((groups, words_per_group), np.uint64)
    for position in range(per_group):
        word_index, shift = divmod(position * spec.bits, WORD_BITS)
        packed[:, word_index] |= columns[:, position] << np.uint64(shift)
        if shift + spec.bits > WORD_BITS:
            packed[:, word_index + 1] |= columns[:, position] >> np.uint64(WORD_BITS - shift)
    return packed.reshape(-1)[: spec.num_words].copy()


def unpack(words: Words, spec: SumSpec) -> Numbers:
    """Invert ``pack``: return numbers below ``2^bits``.

    Raises ValueError if the number of words is not that of ``spec``.
    """
    _require_length(words, spec)
    if spec.bits == WIDE_BITS:
        return np.ascontiguousarray(words.reshape(spec.length, 2).T)
    if spec.bits == WORD_BITS:
        return words.copy()
    if WORD_BITS % spec.bits == 0 and spec.bits >= 8:
        integers = words.astype("<u8", copy=False).view(f"<u{spec.bits // 8}")
        return integers[: spec.length].astype(np.uint64)
    per_group, words_per_group = _group(spec.bits)
    groups = -(-spec.length // per_group)
    padded = np.zeros(groups * words_per_group, np.uint64)
    padded[: spec.num_words] = words
    packed = padded.reshape(groups, words_per_group)
    numbers = np.empty((groups, per_group), np.uint64)
    for position in range(per_group):
        word_index, shift = divmod(position * spec.bits, WORD_BITS)
        numbers[:, position] = packed[:, word_index] >> np.uint64(shift)
        if shift + spec.bits > WORD_BITS:
            numbers[:, position] |= packed[:, word_index + 1] << np.uint64(WORD_BITS - shift)
    numbers &= _ones(spec.bits)
    return numbers.reshape(-1)[: spec.length].copy()


def has_clean_padding(words: Words, spec: SumSpec) -> bool:
    """Return whether the unused bits of the last word are zero."""
    return not len(words) or not words[-1] & ~_last_word(spec)


def clear_padding(words: Words, spec: SumSpec) -> None:
    """Set the unused bits of the last word to zero, in place."""
    if len(words):
        words[-1] &= _last_word(spec)


def add_to(total: Words, words: Words, spec: SumSpec, *, subtracts: bool = False) -> None:
    """Add packed numbers to ``total``, or subtract them, in place and each modulo ``2^bits``.

    Numbers are not unpacked. Chunks have whole groups, so that no number lies in two of them. The
    top bit of each number is left out, so that no carry or borrow leaves a number. It may pass from
    one word to the next within a number. The top bits follow by exclusive or.
    """
    _require_length(total, spec)
    _require_length(words, spec)
    pattern = _top_bits(spec.bits)
    for first in range(0, len(total), len(pattern)):
        total_chunk = total[first : first + len(pattern)]
        chunk = words[first : first + len(pattern)]
        top_bits = pattern[: len(total_chunk)]
        if subtracts:
            upper = total_chunk | top_bits
            lower = chunk & ~top_bits
            result = upper - lower
            borrowed = upper < lower
            result[1:] -= borrowed[:-1]
            total_chunk[:] = result ^ ((total_chunk ^ ~chunk) & top_bits)
        else:
            upper = total_chunk & ~top_bits
            result = upper + (chunk & ~top_bits)
            carried = result < upper
            result[1:] += carried[:-1]
            total_chunk[:] = result ^ ((total_chunk ^ chunk) & top_bits)
    # Subtraction writes into the unused bits, which are the top of no number.
    clear_padding(total, spec)


def _require_length(words: Words, spec: SumSpec) -> None:
    if words.shape != (spec.num_words,):
        raise ValueError(f"{words.shape} words, {spec} has {spec.num_words}")


def _group(bits: int) -> tuple[int, int]:
    """Return the smallest number of numbers that fill whole words, and the number of words."""
    num_bits = math.lcm(bits, WORD_BITS)
    return num_bits // bits, num_bits // WORD_BITS


@lru_cache(maxsize=16)
def _top_bits(bits: int) -> Words:
    """Return the words of a chunk in which only the top bit of each number is set."""
    _, words_per_group = _group(bits)
    num_words = CHUNK_WORDS // words_per_group * words_per_group
    flags = np.zeros(words_per_group * WORD_BITS, np.uint8)
    flags[bits - 1 :: bits] = 1
    pattern = np.packbits(flags, bitorder="little").view("<u8").astype(np.uint64)
    return np.resize(pattern, num_words)


def _ones(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _last_word(spec: SumSpec) -> np.uint64:
    """Return the word in which the used bits of the last word are set."""
    return _ones((spec.length * spec.bits - 1) % WORD_BITS + 1)


def _as_words(integers: NDArray, spec: SumSpec) -> Words:
    """Return numbers of 8, 16 or 32 bits as words."""
    data = np.zeros(spec.num_words * 8, np.uint8)
    data[: integers.nbytes] = integers.view(np.uint8)
    return data.view("<u8").astype(np.uint64, copy=False)
