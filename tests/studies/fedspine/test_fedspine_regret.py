"""Study of the bandit's regret: its surfaces, its figures, and resuming after a stop."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fedspine import regret
from benchmarks.fedspine.regret import FIGURES, KEYS, known, measure, played
from benchmarks.fedspine.report import write_report
from benchmarks.fedspine.surfaces import (
    SURFACES,
    SWITCH,
    Points,
    grid,
    hill,
    moving_hill,
    ridge,
    switching_ridge,
)
from benchmarks.reporting.rows import Rows
from benchmarks.reports import write_again
from strategies.tuning.fedspine.bandit import Exploration


def at(u: float, v: float) -> tuple[Points, Points]:
    return np.array(u), np.array(v)


def test_surfaces_on_paper() -> None:
    """A hill is at exp(-1/2) one standard deviation from its top.

    The moving hill is at the top of its circle after a quarter turn. On the ridge, (0.5, 0.3125)
    takes 1 - 0.15 + 0.25 = 1.1 times the time of the others: 1.25 * 0.5 * 0.8 * 0.725 * 1.6 = 0.58.
    """
    assert hill(0, 1, *at(0.3, 0.7)) == 1
    assert hill(0, 1, *at(0.5, 0.7)) == pytest.approx(np.exp(-0.5))
    assert moving_hill(0, 25, *at(0.5, 0.8)) == pytest.approx(1)
    assert ridge(0, 1, *at(0.5, 0.3125)) == pytest.approx(0.58)
    assert ridge(0, 1, *at(0.0, 0.5)) == 0


@pytest.mark.parametrize("name", SURFACES)
def test_rewards_lie_between_0_and_1(name: str) -> None:
    for number in (1, 37, 200):
        values = SURFACES[name](3, number, *grid())
        assert 0 <= values.min() < values.max() <= 1


def test_a_ridge_switches_every_20_rounds() -> None:
    values = [
        float(switching_ridge(1, number, *at(0.5, 0.3))) for number in range(1, 3 * SWITCH + 1)
    ]
    assert [len(set(values[start : start + SWITCH])) for start in (0, SWITCH, 2 * SWITCH)] == [
        1,
        1,
        1,
    ]
    assert len(set(values)) == 3


def test_the_best_the_fixed_and_the_mean_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 1 pays u and the others 1 - u, so the best fixed arm is u = 0.

    The mean of u over 0, 0.01, ..., 0.99 is 0.495.
    """
    monkeypatch.setattr(regret, "ROUNDS", 3)
    found = known(lambda seed, number, u, v: u if number == 1 else 1 - u, 0)
    assert found.best.tolist() == [0.99, 1, 1]
    assert found.fixed.tolist() == [0, 1, 1]
    assert found.everywhere.tolist() == pytest.approx([0.495, 0.505, 0.505])


def test_a_bandit_finds_a_half_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "NOISE", 0.0)
    means, cells = played(
        lambda seed, number, u, v: np.where(u > 0.5, 1.0, 0.0), 0, Exploration(1.0, 0.7, 0.01)
    )
    assert sum(means[100:]) > 85
    assert cells > 1


def test_a_study_goes_on_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (
        ("DISCOUNTS", (1.0,)),
        ("GRANULARITIES", (0.7,)),
        ("EXPLORATIONS", (0.1,)),
    ):
        monkeypatch.setattr(regret, name, values)
    path = tmp_path / "fedspine-regret"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, {"rounds": 200, "noise": 0.1})
    measure(rows, [0])
    written = path.with_suffix(".csv").read_text()
    assert len(rows.rows) == 3 * len(SURFACES)
    measure(Rows(path.with_suffix(".csv"), KEYS, FIGURES, {"rounds": 200, "noise": 0.1}), [0])
    assert path.with_suffix(".csv").read_text() == written
    write_report(rows, path)
    text = path.with_suffix(".md").read_text()
    assert "| uniform random | 156.3 (1.00) |" in text
    path.with_suffix(".png").unlink()
    assert write_again(path)
    assert path.with_suffix(".png").exists()
    assert path.with_suffix(".md").read_text() == text
