"""Intervals of 95% confidence, by hand and next to R and scipy."""

import pytest

from espalier.results.intervals import mean_interval, wilson_interval


def test_wilson_interval() -> None:
    """Values of R's ``binom::binom.confint(methods = "wilson")``."""
    assert wilson_interval(0.5, 100) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611252), abs=1e-6)
    assert wilson_interval(1.0, 20)[1] == pytest.approx(1.0)


def test_interval_of_a_mean_by_hand() -> None:
    """Three values 1, 2, 3 have the deviation 1, and t is 4.303 with two degrees of freedom."""
    half = 4.303 / 3**0.5
    assert mean_interval([13.0, 11.0, 12.0], 99.0) == pytest.approx((12 - half, 12 + half))
    assert mean_interval([3.0, 1.0, 2.0], 3.0) == pytest.approx((0.0, 3.0))
    assert mean_interval([1.0, 2.0], 9.0) is None


@pytest.mark.parametrize("number", [3, 4, 10, 31, 32, 40, 200])
def test_interval_of_a_mean_is_students(number: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs the extra studies")
    values = [10.0 + (7 * place % 13) / 13 for place in range(number)]
    mean, error = sum(values) / number, stats.sem(values)
    expected = stats.t.interval(0.95, number - 1, loc=mean, scale=error)
    assert mean_interval(values, 99.0) == pytest.approx(expected, rel=1e-4)
