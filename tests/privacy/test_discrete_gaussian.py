"""Discrete Gaussian noise: exact probabilities, no holes, the same moments for sums of terms."""

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier.privacy.discrete_gaussian import (
    MAX_DEVIATION,
    MIN_DEVIATION,
    STEP_BITS,
    discrete_gaussian,
    narrow,
    terms,
)
from espalier.privacy.noise import RandomBits, SecureBits, SeededBits
from pruning_kernels.fixed_point import RECORD_BITS


def probability(table_width: float, place: int) -> Fraction:
    """Return the probability of an integer in a table."""
    table = narrow(table_width)
    upto = [*table.cumulative, 1 << 128]
    index = place - table.least
    return Fraction(upto[index] - (upto[index - 1] if index else 0), 1 << 128)


def test_the_table_has_the_probabilities_of_the_formula() -> None:
    """The sum over all integers is deviation * sqrt(2 pi) up to 1e-1000 of it."""
    width = 40.3
    for place in (-300, -41, -1, 0, 1, 7, 200, 480):
        expected = math.exp(-(place**2) / (2 * width**2)) / (width * math.sqrt(2 * math.pi))
        found = probability(width, place)
        assert float(found) == pytest.approx(expected, rel=1e-9 if abs(place) < 400 else 1e-4)
        assert abs(found - probability(width, -place)) <= Fraction(2, 1 << 128)


def test_inversion_takes_lower_bits_where_upper_ones_are_equal() -> None:
    """Words around each step of the table are tried by hand."""
    table = narrow(3.7)
    for index in (12, len(table.cumulative) // 2, len(table.cumulative) - 12):
        step = table.cumulative[index]
        for whole, expected in ((step - 1, index), (step, index + 1), (step + 1, index + 1)):
            given = iter([whole >> 64, whole & (1 << 64) - 1])
            found = table.draw(1, lambda _, given=given: np.array([next(given)], np.uint64))
            assert found.tolist() == [expected + table.least]
    for word in (0, 2**64 - 1):
        (end,) = table.draw(1, lambda _, word=word: np.array([word], np.uint64)).tolist()
        assert 12 < abs(end) / 3.7 <= -table.least / 3.7


def test_a_sum_of_terms_has_the_probabilities_of_one_gaussian() -> None:
    """Convolve two narrow Gaussians exactly, one of them in steps of 8, as each addition does."""
    fine, step, coarse = 30.0, 8, 25.0
    reach = 400
    weights = {k: math.exp(-(k**2) / (2 * fine**2)) for k in range(-reach, reach + 1)}
    steps = {k: math.exp(-(k**2) / (2 * coarse**2)) for k in range(-reach, reach + 1)}
    together = fine**2 + (step * coarse) ** 2

    def at(number: int) -> float:
        return math.fsum(
            weights.get(number - step * place, 0.0) * steps[place] for place in steps
        ) / math.exp(-(number**2) / (2 * together))

    found = [at(number) for number in (0, 1, 2, 3, 4, 5, 100, 101, 333, -700)]
    # 3.75 steps: the factor differs from 1 by 4 exp(-2 pi^2 3.75^2), which no float shows.
    assert max(found) / min(found) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("deviation", [2.0**10, 1e5, 2.0**40, 2.0**43.6, 3.3e15, 2.0**57])
def test_terms_have_the_variance_and_are_wide_enough(deviation: float) -> None:
    shifts, width = terms(deviation)
    variance = sum(Fraction(width) ** 2 * 4**shift for shift in shifts)
    assert 1 <= variance / Fraction(deviation) ** 2 < 1 + Fraction(1, 10**12)
    assert shifts[0] == 0
    assert all(0 < two - one <= STEP_BITS for one, two in pairwise(shifts))
    for place in range(1, len(shifts)):
        before = width * math.sqrt(sum(4.0**shift for shift in shifts[:place]))
        assert before / 2 ** shifts[place] >= 3.4
    assert width < 2.1 * MIN_DEVIATION


@pytest.mark.parametrize("deviation", [0.0, 100.0, 2 * MAX_DEVIATION, math.nan])
def test_other_deviations_are_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        discrete_gaussian(1, deviation, SecureBits().words)


@pytest.mark.parametrize("bits", [SecureBits(), SeededBits(1, 0, 1)], ids=["secure", "seed"])
def test_noise_has_the_moments_and_tails_of_the_normal_distribution(bits: RandomBits) -> None:
    """A right sampler fails here with a probability below 1e-8."""
    number = 100_000
    found = bits.grid_noise(number, 2.5) / (2.5 * 2.0**RECORD_BITS)
    tolerance = 6 / number**0.5
    assert abs(found.mean()) < tolerance
    assert abs(found.var() - 1) < tolerance * 2**0.5
    assert abs((found**4).mean() - 3) < tolerance * 96**0.5
    for limit in (0.5, 1.0, 2.0, 3.0):
        expected = 2 * NormalDist().cdf(-limit)
        share = (np.abs(found) > limit).mean()
        assert abs(share - expected) < tolerance * (expected * (1 - expected)) ** 0.5


def test_all_last_bits_are_equally_frequent_even_far_out() -> None:
    """Noise of a rounded formula has holes there, by which it can be told from shifted noise."""
    found: NDArray[np.int64] = SeededBits(3, 1, 2).grid_noise(200_000, 1.0)
    far = found[np.abs(found) > 2.5 * 2.0**RECORD_BITS]
    assert len(far) > 2000
    counts = Counter((far & 7).tolist())
    expected = len(far) / 8
    assert sum((counts[low] - expected) ** 2 / expected for low in range(8)) < 45


def test_noise_repeats_with_the_seed_whatever_is_drawn_at_once() -> None:
    noise = SeededBits(3, 1, 2).grid_noise(1000, 2.5)
    assert noise.dtype == np.int64
    assert noise.tolist() == SeededBits(3, 1, 2).grid_noise(1000, 2.5).tolist()
    assert len(set(noise.tolist())) == 1000
