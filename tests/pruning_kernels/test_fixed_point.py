"""Fixed point: exact sums of integers, compared with Python's fractions."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from pruning_kernels.fixed_point import (
    LOW_BITS,
    MAX_PARTIES,
    bound,
    from_words,
    is_possible,
    summed,
    to_words,
)


def numbers_of(seed: int, count: int, least: int, most: int, *, signed: bool) -> list[float]:
    """Return random floats with exponents between ``least`` and ``most``."""
    drawn = random.Random(seed)
    return [
        drawn.choice([-1, 1] if signed else [1])
        * drawn.uniform(1, 2)
        * 2.0 ** drawn.randint(least, most - 1)
        for _ in range(count)
    ]


def rounded(number: float, fraction_bits: int) -> Fraction:
    """Return the nearest multiple of ``2^-fraction_bits``, by Python's integers."""
    return Fraction(round(Fraction(number) * 2**fraction_bits), 2**fraction_bits)


@pytest.mark.parametrize("fraction_bits", [56, 64])
@pytest.mark.parametrize("signed", [False, True])
def test_sums_equal_fractions(fraction_bits: int, signed: bool) -> None:
    most = 95 - fraction_bits
    parts = [numbers_of(seed, 50, -90, most, signed=signed) for seed in range(9)]
    words = [to_words(torch.tensor(part, dtype=torch.float64), fraction_bits) for part in parts]
    assert all(is_possible(part, signed=signed) for part in words)
    found = from_words(summed(words), fraction_bits).tolist()
    exact = [sum(rounded(x, fraction_bits) for x in column) for column in zip(*parts, strict=True)]
    # ``float`` of a fraction is rounded once.
    assert found == [float(number) for number in exact]


def test_one_number_is_rounded_at_most_once() -> None:
    numbers = [
        0.0,
        1.0,
        2.0**-57,
        3 * 2.0**-57,
        2.0**-4 * (1 + 2.0**-52),
        2.0**-8 - 2.0**-61,
        -(2.0**-58),
    ]
    words = to_words(torch.tensor(numbers, dtype=torch.float64), 56)
    # Ties go to the even multiple; a low word that is rounded up carries.
    assert from_words(words, 56).tolist() == [
        0.0, 1.0, 0.0, 2.0**-55, 2.0**-4 * (1 + 2.0**-52), 2.0**-8, 0.0,
    ]  # fmt: skip
    assert words.dtype == np.uint64
    assert words[:, 1].tolist() == [0, 2 ** (56 - LOW_BITS)]


def test_order_and_grouping_have_no_effect() -> None:
    words = [
        to_words(torch.tensor(numbers_of(seed, 20, -60, 30, signed=False)).double(), 56)
        for seed in range(7)
    ]
    whole = summed(words)
    assert (summed(words[::-1]) == whole).all()
    assert (summed([summed(words[:3]), summed(words[3:])]) == whole).all()


def test_masks_that_cancel_leave_the_sum() -> None:
    """Words of secure sums are masked by uniform integers modulo 2^64 that cancel in the sum."""
    drawn = np.random.default_rng(0)
    words = [to_words(torch.tensor([0.1 * (seed + 1), 1e9]).double(), 56) for seed in range(3)]
    masks = drawn.integers(0, 2**64, (3, 2, 2), dtype=np.uint64)
    masks[2] = np.uint64(0) - masks[0] - masks[1]
    hidden = [part + mask for part, mask in zip(words, masks, strict=True)]
    assert (summed(hidden) == summed(words)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_fits(sign: int) -> None:
    """The largest numbers of all parties are added by multiplication modulo 2^64."""
    largest = sign * float(np.nextafter(bound(56), 0))
    words = to_words(torch.tensor([largest], dtype=torch.float64), 56)
    total = words * np.uint64(MAX_PARTIES)
    # The number itself is exact; the sum is rounded to a float64.
    assert from_words(total, 56).item() == pytest.approx(largest * MAX_PARTIES, rel=1e-15)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), bound(56), -bound(56)])
def test_numbers_out_of_range_are_refused(wrong: float) -> None:
    with pytest.raises(OverflowError, match=r"not finite, or 5\.49756e"):
        to_words(torch.tensor([1.0, wrong], dtype=torch.float64), 56)


def test_words_of_no_party_are_recognised() -> None:
    words = to_words(torch.tensor([1.0, 2.0], dtype=torch.float64), 56)
    assert is_possible(words, signed=False)
    for row, value in ((0, 1 << 48), (1, 1 << 47), (1, 2**64 - 1)):
        wrong = words.copy()
        wrong[row, 1] = value
        assert not is_possible(wrong, signed=False)
    # Minus one in the high word is a small negative number.
    assert is_possible(wrong, signed=True)
