"""Printed counts, times and sizes, compared with texts written by hand."""

import pytest

from espalier.amounts import count, duration, size


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (0, "round", "", "0 rounds"),
        (1, "round", "", "1 round"),
        (2, "round", "", "2 rounds"),
        (1200, "sample", "", "1,200 samples"),
        (1, "entry", "entries", "1 entry"),
        (3, "entry", "entries", "3 entries"),
    ],
)
def test_one_is_not_many(number: int, noun: str, plural: str, text: str) -> None:
    assert count(number, noun, plural) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (5.42, "5.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (60.0, "60 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (125, "2 min 5 s"),
        (3599, "59 min 59 s"),
        (3599.7, "1 h"),
        (5420, "1 h 30 min"),
        (7_169, "1 h 59 min"),
        (7_171, "2 h"),
        (172_700, "47 h 58 min"),
        (172_800, "2 d"),
        (190_000, "2 d 5 h"),
    ],
)
def test_a_time_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds, tenths=True) == text


def test_time_has_tenths_only_on_request() -> None:
    assert [duration(0.4), duration(2.6), duration(9.9), duration(125)] == [
        "0 s",
        "3 s",
        "10 s",
        "2 min 5 s",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (15_312_345, "15.3 MB"),
        (405_000, "405 kB"),
        (2_000_000_000, "2 GB"),
        (1_234_000_000_000, "1,234 GB"),
    ],
)
def test_a_size_has_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
