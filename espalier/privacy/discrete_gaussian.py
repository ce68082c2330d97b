"""Discrete Gaussian noise: integers k with probability proportional to exp(-k^2 / (2 deviation^2)).

A narrow Gaussian is drawn from a table by inversion, and a wide one is a sum of narrow ones
times powers of two (Micciancio and Walter 2017, "Gaussian Sampling over the Integers", section 4):
x_0 + 2^8 x_1 + 2^16 x_2 + ... Each term is wide compared with the step of the next one, so the sum
has the discrete Gaussian distribution, with the sum of the variances.

Exactness: at each addition the probability of every integer is that of the discrete Gaussian up to
a factor of 1 +- 2^-300. With steps of at most ``STEP_BITS`` the standard deviation of what comes
before is at least 3.4 steps, and by Poisson's summation formula the factor is 1 +- 4 exp(-2 pi^2
3.4^2). The table has probabilities of 128 bits, and leaves out less than 2^-126 beyond
``REACH`` deviations; the total variation distance of a number is below 2^-107.

Noise from a floating-point formula, rounded to integers, has no such bound: from five deviations on
it never takes some values at all, and everybody can compute which, so that a result can tell for
certain which of two data sets it comes from (Mironov 2012). With a million numbers in a message
this happens in nearly every message.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

STEP_BITS = 8
"""Bits by which each term of a sum is coarser than the one before, at most."""
MIN_DEVIATION = 2.0**10
MAX_DEVIATION = 2.0**57
"""Range of the standard deviation."""
REACH = 13.5
"""Number of standard deviations that the table covers on either side."""
CHUNK = 1 << 18
"""Numbers that are drawn at a time, which bounds memory."""
TABLE_BITS = 128
EXTRA_BITS = 256
"""Bits of the table's probabilities, and of the numbers from which they are computed."""
DIGITS = Context(prec=100)

RandomWords = Callable[[int], NDArray[np.uint64]]
"""Function that returns this number of uniform integers of 64 bits."""


@dataclass(frozen=True)
class Table:
    """Cumulative probabilities of a narrow discrete Gaussian."""

    least: int
    """Smallest integer of the table."""
    cumulative: list[int]
    """Probability of each integer or a smaller one, in units of 2^-128, without the last."""
    high: NDArray[np.uint64]
    """Upper 64 bits of each."""

    def draw(self, number: int, words: RandomWords) -> NDArray[np.int64]:
        """Return integers by inversion, (number,)."""
        upper = words(number)
        lower = words(number)
        # Binary search in the upper halves decides nearly always.
        positions = np.searchsorted(self.high, upper, side="right")
        # Only if the upper bits are equal do the lower ones decide.
        ties = np.flatnonzero(self.high[np.maximum(positions - 1, 0)] == upper)
        for index in ties.tolist():
            value = int(upper[index]) << 64 | int(lower[index])
            positions[index] = bisect_right(self.cumulative, value)
        return positions + np.int64(self.least)


def discrete_gaussian(number: int, deviation: float, words: RandomWords) -> NDArray[np.int64]:
    """Return independent integers of a discrete Gaussian, (number,).

    Raises ValueError if the deviation is not in the range.

    Parameters
    ----------
    deviation : parameter of the distribution, which is its standard deviation up to 2^-1000 of it;
        rounded up by less than 1e-12 of it
    """
    shifts, width = terms(deviation)
    table = narrow(width)
    # In chunks, because each draw needs two words per number.
    values = np.zeros(number, np.int64)
    for first in range(0, number, CHUNK):
        chunk = values[first : first + CHUNK]
        for shift in shifts:
            # Terms are independent; shifts keep integers exact.
            chunk += table.draw(len(chunk), words) << np.int64(shift)
    return values


def terms(deviation: float) -> tuple[list[int], float]:
    """Return the powers of two of all terms, as exponents, and the deviation of each narrow one."""
    if not MIN_DEVIATION <= deviation <= MAX_DEVIATION:
        raise ValueError(f"a deviation of {deviation:g} is out of range")
    # The widest term: its step is as coarse as the deviation allows.
    top = math.floor(math.log2(deviation / MIN_DEVIATION))
    shifts = [*range(0, top, STEP_BITS), top]
    norm = math.sqrt(sum(4.0**shift for shift in shifts))
    # Slightly wider: rounding must not make the noise smaller.
    return shifts, deviation / norm * (1 + 2.0**-42)


@lru_cache(maxsize=4)
def narrow(width: float) -> Table:
    """Return the table of the discrete Gaussian of a small deviation."""
    unit = 1 << EXTRA_BITS
    # exp(-(k+1)^2 a) = exp(-k^2 a) exp(-(2k+1) a), and the last factor falls by exp(-2a).
    rate = DIGITS.divide(Decimal(1), DIGITS.multiply(Decimal(2), DIGITS.power(Decimal(width), 2)))
    ratio = _fixed(DIGITS.exp(-rate))
    fall = _fixed(DIGITS.exp(DIGITS.multiply(Decimal(-2), rate)))
    weights = [unit]
    # Integers of 256 bits after the point: errors stay far below those of the table.
    for _ in range(math.ceil(REACH * width)):
        weights.append(weights[-1] * ratio >> EXTRA_BITS)
        ratio = ratio * fall >> EXTRA_BITS
    # The distribution is symmetric; the weight of 0 occurs once.
    symmetric = [*weights[:0:-1], *weights]
    total = sum(symmetric)
    cumulative = [(weight_sum << TABLE_BITS) // total for weight_sum in accumulate(symmetric)][:-1]
    high = np.array([threshold >> 64 for threshold in cumulative], np.uint64)
    return Table(1 - len(weights), cumulative, high)


def _fixed(number: Decimal) -> int:
    """Return a number in units of 2^-256, rounded down."""
    return int(DIGITS.multiply(number, Decimal(1 << EXTRA_BITS)))
