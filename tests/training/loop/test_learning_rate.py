"""Learning rates of a run of twelve steps, compared with values computed by hand."""

from typing import Any

import pytest

from espalier.settings.tables.training import TrainingSettings
from espalier.training.optimizer import learning_rate


def rates(steps: range = range(12), **settings: Any) -> list[float]:
    return [
        learning_rate(
            TrainingSettings(**settings).model_copy(update={"learning_rate": 8.0}), step, 12
        )
        for step in steps
    ]


def test_a_constant_rate() -> None:
    assert rates() == [8.0] * 12


def test_linear_rate_is_zero_after_last_step() -> None:
    expected = [8 * (12 - step) / 12 for step in range(12)]
    assert rates(schedule="linear") == pytest.approx(expected)
    assert rates(range(12, 14), schedule="linear") == [0.0, 0.0]


def test_half_a_cosine() -> None:
    """The cosine is 1/2 at 1/3 of the steps, 0 at 1/2 and -1/2 at 2/3."""
    found = rates(schedule="cosine")
    assert [found[0], found[4], found[6], found[8]] == pytest.approx([8.0, 6.0, 4.0, 2.0])
    assert found == sorted(found, reverse=True)
    assert rates(range(12, 20), schedule="cosine") == pytest.approx([0.0] * 8)
