"""S-UCB by hand, and properties that hold for all rewards."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.seeds import derive_seed
from strategies.tuning.fedspine.bandit import Bandit, Cell, Exploration, Pull

HALVES = (Cell(0.0, 0.5, 0.0, 1.0), Cell(0.5, 1.0, 0.0, 1.0))


def played(
    how: Exploration, rewards: list[float], seed: int = 0, device: int = 0
) -> tuple[Bandit, list[tuple[float, float]]]:
    bandit = Bandit(how)
    points = []
    for number, reward in enumerate(rewards, start=1):
        points.append(bandit.draw(seed, device, number))
        bandit = bandit.learn(*points[-1], reward, number)
    return bandit, points


def test_bounds_on_paper() -> None:
    """Round 4 with lambda 1/2.

    Left: rewards 1 and 0 of rounds 1 and 3, which count 1/8 and 1/2. Right: reward 0.5 of round 2,
    which counts 1/4.
    """
    history = (Pull(0.1, 0.1, 1.0, 1), Pull(0.7, 0.9, 0.5, 2), Pull(0.4, 0.0, 0.0, 3))
    bandit = Bandit(Exploration(0.5, 0.2, 2.0), HALVES, history)
    spread = 2 * math.log(1 + 7 / 8)
    expected = [(1 / 8) / (5 / 8) + math.sqrt(spread / (5 / 8)), 0.5 + math.sqrt(spread / (1 / 4))]
    assert bandit.bounds(HALVES, 4) == pytest.approx(expected)
    assert Bandit(Exploration(0.5, 0.2, 0.0), HALVES, history).bounds(HALVES, 4) == pytest.approx(
        [0.2, 0.5]
    )


def test_root_in_round_2_is_of_positive_number() -> None:
    bandit = Bandit(Exploration(0.9, exploration=2.0), HALVES, (Pull(0.1, 0.1, 1.0, 1),))
    assert math.log(0.9) < 0
    assert bandit.bounds(HALVES, 2) == pytest.approx(
        [1 + math.sqrt(2 * math.log(1.9) / 0.9), math.inf]
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=12),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.integers(0, 99),
)
def test_bounds_against_a_slow_loop(rewards: list[float], discount: float, seed: int) -> None:
    bandit, points = played(Exploration(discount, 0.3, 2.0), rewards, seed)
    now = len(rewards) + 1
    counts = []
    means = []
    for cell in bandit.cells:
        inside = [number for number, (u, v) in enumerate(points, start=1) if cell.holds(u, v)]
        counts.append(sum(discount ** (now - number) for number in inside))
        means.append(sum(discount ** (now - number) * rewards[number - 1] for number in inside))
    total = sum(counts)
    expected = [
        mean / count + math.sqrt(2 * math.log(1 + total) / count) if count else math.inf
        for mean, count in zip(means, counts, strict=True)
    ]
    assert bandit.bounds(bandit.cells, now) == pytest.approx(expected)


def test_long_forgotten_counts_as_never_seen() -> None:
    """0.3 to the power of 4000 is 0 in float64."""
    assert Bandit(Exploration(0.3), HALVES, (Pull(0.1, 0.1, 1.0, 1),)).bounds(HALVES, 4000) == [
        math.inf,
        math.inf,
    ]


def test_cell_is_cut_in_four_at_its_point() -> None:
    cells = Bandit(Exploration(granularity=0.2)).learn(0.25, 0.5, 1.0, 1).cells
    expected = [(0, 0.25, 0, 0.5), (0, 0.25, 0.5, 1), (0.25, 1, 0, 0.5), (0.25, 1, 0.5, 1)]
    assert [(c.left, c.right, c.low, c.high) for c in cells] == expected
    assert [cell.holds(0.25, 0.5) for cell in cells] == [False, False, False, True]


@pytest.mark.parametrize(
    ("point", "number"),
    [((0.04, 0.5), 2), ((0.5, 0.97), 2), ((0.05, 0.05), 4), ((0.0, 0.0), 1), ((0.951, 0.951), 1)],
)
def test_cuts_that_leave_a_thin_cell_are_dropped(point: tuple[float, float], number: int) -> None:
    """1/4 of delta = 0.2 is 0.05."""
    assert len(Bandit(Exploration(granularity=0.2)).learn(*point, 0.0, 1).cells) == number


def test_a_small_cell_stays_whole() -> None:
    """The diameter is sqrt(0.5^2 + 1^2) = 1.118, which does not exceed 1.2.

    With 1.1, parts must be at least 0.275 wide; with 0.9, 0.225.
    """
    for granularity, number in ((1.2, 2), (1.1, 3), (0.9, 5)):
        assert (
            len(Bandit(Exploration(granularity=granularity), HALVES).learn(0.75, 0.5, 0.0, 1).cells)
            == number
        )


def test_the_best_cell_is_played() -> None:
    """Both cells were seen once and differ only in the reward; exploration is off."""
    history = (Pull(0.1, 0.1, 0.2, 1), Pull(0.7, 0.9, 0.9, 2))
    bandit = Bandit(Exploration(1.0, 2.0, 0.0), HALVES, history)
    assert all(bandit.draw(seed, 0, 3)[0] >= 0.5 for seed in range(20))
    worse = Bandit(Exploration(1.0, 2.0, 0.0), HALVES, (history[0], Pull(0.7, 0.9, 0.1, 2)))
    assert all(worse.draw(seed, 0, 3)[0] < 0.5 for seed in range(20))


def test_ties_and_points_are_drawn_at_random() -> None:
    points = np.array([Bandit(Exploration(), HALVES).draw(0, device, 1) for device in range(400)])
    assert 140 < (points[:, 0] < 0.5).sum() < 260
    assert np.histogram(points[:, 0], 4, (0, 1))[0].min() > 60
    assert np.histogram(points[:, 1], 4, (0, 1))[0].min() > 60


def test_the_draw_is_that_of_the_derived_seed() -> None:
    numbers = np.random.default_rng(derive_seed(7, "bandit", client=3, server_round=5))
    numbers.integers(1)
    assert Bandit(Exploration()).draw(7, 3, 5) == (numbers.random(), numbers.random())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=25), st.floats(0.05, 1.5), st.integers(0, 2**31))
def test_cells_tile_the_square(rewards: list[float], granularity: float, seed: int) -> None:
    bandit = Bandit(Exploration(granularity=granularity))
    for number, reward in enumerate(rewards, start=1):
        bandit = bandit.learn(*bandit.draw(seed, 1, number), reward, number)
        area = math.fsum((c.right - c.left) * (c.high - c.low) for c in bandit.cells)
        assert area == pytest.approx(1)
        assert all(
            sum(cell.holds(pull.u, pull.v) for cell in bandit.cells) == 1 for pull in bandit.history
        )
        assert all(
            min(c.right - c.left, c.high - c.low) >= 0.2499 * min(granularity, 1)
            for c in bandit.cells
        )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=20), st.integers(0, 19), st.integers(0, 2**31)
)
def test_stored_bandit_goes_on_unchanged(rewards: list[float], when: int, seed: int) -> None:
    whole, points = played(Exploration(), rewards, seed, 4)
    bandit = Bandit(Exploration())
    for number, reward in enumerate(rewards, start=1):
        if number == min(when, len(rewards)):
            bandit = Bandit.from_json(json.loads(json.dumps(bandit.to_json())))
        point = bandit.draw(seed, 4, number)
        assert point == points[number - 1]
        bandit = bandit.learn(*point, reward, number)
    assert bandit == whole


def test_devices_are_independent_of_each_other() -> None:
    orders: list[dict[int, tuple[float, float]]] = []
    for devices in ([0, 1, 2], [2, 0, 1]):
        bandits = {device: Bandit(Exploration()) for device in devices}
        drawn = {}
        for number in range(1, 8):
            for device in devices:
                drawn[device] = bandits[device].draw(3, device, number)
                bandits[device] = bandits[device].learn(*drawn[device], drawn[device][0], number)
        orders.append({device: drawn[device] for device in sorted(drawn)})
    assert orders[0] == orders[1]
    assert len(set(orders[0].values())) == 3


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.integers(0, 2**31))
def test_unplayable_points_are_not_drawn(least: float, seed: int) -> None:
    bandit = Bandit(Exploration(granularity=0.1))
    for number in range(1, 12):
        u, v = bandit.draw(seed, 0, number, least)
        if least < 1:
            assert u >= least
        bandit = bandit.learn(u, v, u, number)


def test_cells_are_cut_where_unplayable() -> None:
    """The point at 0.1 lies below 0.25 and no longer counts."""
    history = (Pull(0.1, 0.1, 9.0, 1), Pull(0.3, 0.1, 0.0, 2), Pull(0.6, 0.5, 1.0, 3))
    bandit = Bandit(Exploration(1.0, 0.2, 0.0), HALVES, history)
    assert bandit.bounds(bandit.cells, 4) == pytest.approx([4.5, 1.0])
    for least, right in ((0.0, False), (0.25, True), (0.5, True), (1.0, True)):
        assert all((bandit.draw(seed, 0, 4, least)[0] >= 0.5) is right for seed in range(10))
