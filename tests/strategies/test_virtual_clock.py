"""Virtual times, compared with values computed by hand."""

import math

import pytest

from espalier.settings.fleet import Conditions
from strategies.fleet import computing_seconds, round_seconds, sending_seconds, waiting_seconds

SLOW = Conditions(0, 1e9, 2e6)


def test_on_paper() -> None:
    """20 steps of 100 tokens take 2000 * 4300 operations.

    The model has 1000 frozen and 50 trained parameters. 1 MB is 8 megabits.
    """
    assert computing_seconds(20, 100, 1000, 50, SLOW) == pytest.approx(8.6e6 / 1e9)
    assert sending_seconds(1_000_000, SLOW) == 4
    assert computing_seconds(0, 100, 1000, 50, SLOW) == sending_seconds(0, SLOW) == 0


def test_waiting_on_paper() -> None:
    """Devices with times of 1, 2 and 6 seconds wait for 5, 4 and 0 seconds."""
    assert waiting_seconds({4: 1.0, 0: 2.0, 2: 6.0}) == 3
    assert waiting_seconds([6.0, 2.0, 1.0]) == 3
    assert round_seconds({4: 1.0, 0: 2.0, 2: 6.0}) == 6
    assert waiting_seconds([]) == round_seconds({}) == 0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(bad: float) -> None:
    for ask in (waiting_seconds, round_seconds):
        with pytest.raises(ValueError, match="finite and at least 0"):
            ask([1.0, bad])


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="steps, tokens and parameters"):
        computing_seconds(1, 1, -1, 0, SLOW)
    with pytest.raises(ValueError, match="bytes are at least 0"):
        sending_seconds(-1, SLOW)
