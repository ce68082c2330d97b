"""Numbers in fixed point as integers of 128 bits, whose sum shows no carries of single parties.

``fixed_point`` adds low and high words each for itself. Their sums tell how often the low words of
single parties were carried over. Integers of 128 bits have one sum.
"""

import numpy as np

from pruning_kernels.fixed_point import LOW_BITS, Words

WORD_BITS = 64


def to_wide(words: Words) -> Words:
    """Return fixed-point words of one party, (2, numbers), as integers modulo 2^128.

    The result has the same shape and dtype: low words, then high words, in two's complement.
    """
    low, high = words
    shift = np.uint64(WORD_BITS - LOW_BITS)
    above = (high.view(np.int64) >> np.int64(WORD_BITS - LOW_BITS)).view(np.uint64)
    return np.stack([low | high << np.uint64(WORD_BITS) - shift, above])


def from_wide(numbers: Words) -> Words:
    """Invert ``to_wide``, also for a sum of integers: return words in fixed point without carries.

    Sums must lie within -2^111 and 2^111, which those of 65,535 parties do.
    """
    low, high = numbers
    shift = np.uint64(WORD_BITS - LOW_BITS)
    mask = np.uint64((1 << LOW_BITS) - 1)
    return np.stack([low & mask, low >> np.uint64(LOW_BITS) | high << shift])
