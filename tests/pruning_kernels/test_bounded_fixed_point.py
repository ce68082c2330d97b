"""Bounded fixed point: sums modulo 2^bits, compared with Python's fractions."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pruning_kernels.bounded_fixed_point import Scale, fraction_that_fits, signed_bits


def summed(parts: list[np.ndarray], bits: int) -> np.ndarray:
    """Return the sum modulo 2^bits, by Python's integers."""
    columns = zip(*(part.tolist() for part in parts), strict=True)
    return np.array([sum(column) % 2**bits for column in columns], np.uint64)


def test_by_hand() -> None:
    scale = Scale(exponent=1, fraction_bits=2)
    numbers = np.array([0.0, 1.0, -1.0, 0.125, 0.375, 1.9, 5.0, -5.0])
    # Units of 1/4, ties to even; 2 is the bound.
    expected = [0, 4, -4, 0, 2, 8, 8, -8]
    assert scale.integers(numbers).view(np.int64).tolist() == expected
    # A weight is multiplied in before the number is rounded.
    assert scale.integers(np.array([0.125, 1.9]), 3).view(np.int64).tolist() == [2, 23]


def test_sign_is_that_of_the_top_bit() -> None:
    scale = Scale(0, 2)
    assert scale.numbers(np.array([0, 3, 4, 7], np.uint64), 3).tolist() == [0.0, 0.75, -1.0, -0.25]


@pytest.mark.parametrize(("parties", "weight"), [(1, 1), (3, 1), (8, 1), (100, 1), (8, 1_000_000)])
def test_bits_are_enough_for_the_largest_sums_and_one_less_is_not(
    parties: int, weight: int
) -> None:
    scale = Scale(exponent=3, fraction_bits=20)
    bits = signed_bits(23, parties, weight)
    for value in (8.0, -8.0):
        part = scale.integers(np.array([value]), weight)
        total = scale.numbers(summed([part] * parties, bits), bits)
        assert total.tolist() == [value * parties * weight]
    part = scale.integers(np.array([8.0]), weight)
    wrong = scale.numbers(summed([part] * parties, bits - 1), bits - 1)
    assert wrong.tolist() != [8.0 * parties * weight]


@given(st.integers(1, 900), st.sampled_from([1, 1_000_000]), st.integers(0, 16))
def test_what_fits_has_at_most_64_bits(parties: int, weight: int, exponent: int) -> None:
    fraction = fraction_that_fits(exponent, parties, weight, 44)
    assert fraction == 44 or signed_bits(exponent + fraction, parties, weight) == 64
    assert signed_bits(exponent + fraction, parties, weight) <= 64


def test_sum_is_off_by_half_a_unit_per_party_and_order_has_no_effect() -> None:
    drawn = random.Random(5)
    scale = Scale(6, 24)
    parts = [[drawn.uniform(-3, 3) for _ in range(40)] for _ in range(9)]
    weights = [drawn.randint(1, 1000) for _ in parts]
    bits = signed_bits(30, 9, 1000)
    sent = [
        scale.integers(np.array(part), weight) for part, weight in zip(parts, weights, strict=True)
    ]
    found = scale.numbers(summed(sent, bits), bits)
    assert torch.equal(found, scale.numbers(summed(sent[::-1], bits), bits))
    for place, number in enumerate(found.tolist()):
        exact = sum(
            Fraction(part[place]) * weight for part, weight in zip(parts, weights, strict=True)
        )
        # The product of a float64 and its weight is rounded too, far below a unit.
        assert abs(Fraction(number) - exact) <= Fraction(9, 2 * 2**24) + Fraction(1, 2**40)


def test_nan_is_refused() -> None:
    with pytest.raises(OverflowError, match="NaN"):
        Scale(0, 4).integers(np.array([float("nan")]))


def test_mean_stays_within_the_bound() -> None:
    """One of three parties may add any integer."""
    scale = Scale(1, 4)
    bits = signed_bits(5, 3, 2)
    part = scale.integers(np.array([0.5, 0.5, 0.5]), 2)
    wrong = np.array([16, 220, 2**bits - 250], np.uint64)
    total = summed([part, part, wrong], bits)
    assert scale.mean(total, bits, 6).tolist() == [0.5, 2.0, -2.0]
