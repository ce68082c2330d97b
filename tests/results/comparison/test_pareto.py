"""Pareto front and plot."""

import random
from itertools import product

import pytest

from espalier.results.comparison.pareto import Plot, Point, draw, front_of


def test_front_by_hand() -> None:
    costs = [1.0, 2.0, 2.0, 3.0, 4.0]
    losses = [9.0, 5.0, 6.0, 5.0, 1.0]
    assert front_of(costs, losses, lower_is_better=True) == [0, 1, 4]
    assert front_of(costs, losses, lower_is_better=False) == [0]


def test_the_original_model_is_a_rival() -> None:
    """A result that is larger and worse than the original model is nobody's choice."""
    assert front_of([3.0, 1.0], [9.0, 8.0], lower_is_better=True) == [1]
    assert front_of([3.0, 1.0], [7.0, 8.0], (2.0, 5.0), lower_is_better=True) == [1]
    assert front_of([3.0], [7.0], (2.0, 5.0), lower_is_better=True) == []


def test_equal_points_are_both_on_the_front() -> None:
    assert front_of([1.0, 1.0], [2.0, 2.0], lower_is_better=True) == [0, 1]


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_front_is_what_no_other_point_beats(lower_is_better: bool) -> None:
    generator = random.Random(0)
    costs = [float(generator.randrange(8)) for _ in range(30)]
    values = [float(generator.randrange(8)) for _ in range(30)]
    expected = set(range(30))
    for one, other in product(range(30), repeat=2):
        gain = values[one] - values[other] if lower_is_better else values[other] - values[one]
        if costs[other] <= costs[one] and gain >= 0 and (costs[other] < costs[one] or gain > 0):
            expected.discard(one)
    assert set(front_of(costs, values, lower_is_better=lower_is_better)) == expected


def test_equal_plots_have_equal_bytes() -> None:
    points = [Point(f"run {n}", "flap", float(n), 10.0 - n) for n in range(20)]
    plot = Plot(points, True, "wiki perplexity", "parameters (millions)", 3.0)
    for form in ("svg", "png"):
        assert draw(plot, form) == draw(plot, form)
    assert b"wiki perplexity (lower is better)" in draw(plot, "svg")
