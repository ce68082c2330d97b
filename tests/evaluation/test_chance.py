"""Scores of a model that has learnt nothing, computed by hand."""

import math

import pytest

from espalier.data.tasks.item import Item
from espalier.evaluation.scores import chance_of_options, majority_share, uniform_loss


def test_levels_of_chance() -> None:
    items = [
        Item(("?",), ("a", "b"), 1),
        Item(("?",), ("a", "b", "c", "d"), 1),
        Item(("?",), ("a", "b"), 0),
    ]
    assert chance_of_options(items) == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert majority_share(items) == pytest.approx(2 / 3)
    assert uniform_loss(4096) == pytest.approx(12 * math.log(2))
