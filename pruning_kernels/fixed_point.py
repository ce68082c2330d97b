"""Sums in fixed point: integers whose sum over parties is exact, in any order and modulo 2^64.

A number is ``(high * 2^48 + low) / 2^fraction_bits`` with two words of 64 bits: ``low`` has 48
bits, and ``high`` is a signed integer of 48 bits (two's complement). Words are added each for
itself, modulo 2^64, and carries are resolved when the sum is read. So 16 bits of each word are
free, and the sum over up to ``MAX_PARTIES`` parties cannot overflow.

Rounding: each party's number is rounded once, to the nearest multiple of ``2^-fraction_bits``. A
float64 of magnitude ``2^(52 - fraction_bits)`` or more is such a multiple, so it is not rounded.
Range: magnitudes below ``2^(95 - fraction_bits)``; others are refused and never clipped.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

LOW_BITS = 48
"""Number of bits of the low word that one party uses."""
HIGH_BITS = 48
"""Number of bits of the high word that one party uses, with its sign."""
MAX_PARTIES = (1 << 64 - LOW_BITS) - 1
"""Maximum number of parties whose words can be added."""

RECORD_BITS = 40
"""Bits after the point of records' contributions and their noise in private runs."""

Words = NDArray[np.uint64]
"""Numbers in fixed point, (2, numbers), uint64: low words, then high words."""


def bound(fraction_bits: int) -> float:
    """Return the power of two that magnitudes must stay below."""
    return 2.0 ** (LOW_BITS + HIGH_BITS - 1 - fraction_bits)


def to_words(numbers: "Tensor", fraction_bits: int) -> Words:
    """Return numbers, float64, (numbers,), in fixed point, rounded to nearest (ties to even).

    Raises
    ------
    OverflowError
        If a number is not finite, or not below ``bound(fraction_bits)``.
    """
    values = numbers.detach().cpu().double().numpy()
    # NaN compares as False, so it is refused too.
    if not (np.abs(values) < bound(fraction_bits)).all():
        raise OverflowError(f"a number is not finite, or {bound(fraction_bits):g} or more")
    # All steps but the rounding are exact: powers of two, and parts of one float64.
    scaled = np.ldexp(values, fraction_bits - LOW_BITS)
    # ``floor`` leaves a low word that is never negative; only the high word has a sign.
    high = np.floor(scaled)
    low = np.rint(np.ldexp(scaled - high, LOW_BITS))
    # The low word may be rounded up to its bound.
    carry = low == 2.0**LOW_BITS
    high = high + carry
    low = np.where(carry, 0.0, low)
    return np.stack([low.astype(np.uint64), high.astype(np.int64).view(np.uint64)])


def words_of(integers: NDArray[np.int64]) -> Words:
    """Return integers, (numbers,), as words: multiples of ``2^-fraction_bits``, exactly."""
    # The mask of a negative integer and its arithmetic shift agree: the low word stays nonnegative.
    low = integers & np.int64((1 << LOW_BITS) - 1)
    return np.stack([low.view(np.uint64), (integers >> np.int64(LOW_BITS)).view(np.uint64)])


def summed(parts: Sequence[Words]) -> Words:
    """Return the sum of several parties' words, modulo 2^64; the order has no effect."""
    return np.add.reduce(np.stack(parts), axis=0, dtype=np.uint64)


def from_words(words: Words, fraction_bits: int) -> "Tensor":
    """Return a number or a sum in fixed point as float64, (numbers,).

    Sums of magnitude below ``2^(101 - fraction_bits)``, which those of 64 parties are, are rounded
    once. Larger ones are rounded twice.
    """
    # A client exchanges words without torch, which takes a second to import.
    import torch

    return torch.from_numpy(as_floats(words, fraction_bits))


def as_floats(words: Words, fraction_bits: int) -> NDArray[np.float64]:
    """Return the numbers of ``from_words`` as an array, without torch."""
    low, high = words
    # Add the carries of the low words, which add up above bit 48, to the high word.
    high = (high + (low >> np.uint64(LOW_BITS))).view(np.int64)
    rest = low & np.uint64((1 << LOW_BITS) - 1)
    values = np.ldexp(high.astype(np.float64), LOW_BITS) + rest.astype(np.float64)
    return np.ldexp(values, -fraction_bits)


def is_possible(words: Words, *, signed: bool) -> bool:
    """Return whether the words are valid for one client: in their bits; unsigned ones >= 0."""
    low, high = words
    limit = 1 << HIGH_BITS - 1
    numbers = high.view(np.int64)
    minimum = -limit if signed else 0
    return bool(
        # A word beyond its bits would give one party more than its share of the sum.
        (low >> np.uint64(LOW_BITS) == 0).all() and ((numbers >= minimum) & (numbers < limit)).all()
    )
