"""Mapping from points of the unit square to pruning ratios and ranks, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.tuning.fedspine.bandit import (
    ArmSpace,
    Bandit,
    Exploration,
    Kind,
    Refinement,
    step_for,
)


def test_relative_on_paper() -> None:
    """delta_max is 0.1, the target 0.3, the ranks 2 to 32; v = 0.5 gives rank 8.

    That is half of the doublings from 2 to 32.
    """
    space = ArmSpace(0.3, 0.1, 2, 32)
    assert space.refinement(0.5, 0.5, 0.1) == Refinement(pytest.approx(0.15), 8)
    assert space.refinement(0.0, 0.0, 0.1) == Refinement(0.1, 2)
    assert space.refinement(0.999, 0.999, 0.25) == Refinement(0.3, 32)
    assert space.least(0.2) == 0


def test_absolute_on_paper() -> None:
    space = ArmSpace(0.5, 0.1, 2, 32, "absolute")
    assert space.refinement(0.5, 0.5, 0.1) == Refinement(0.25, 17)
    assert space.refinement(0.1, 0.0, 0.1) == Refinement(0.1, 2)
    assert [space.least(pruned) for pruned in (0.0, 0.25, 0.5)] == [0, pytest.approx(0.5), 1]
    assert ArmSpace(0.0, 1.0, 2, 32, "absolute").least(0.0) == 1


@given(
    st.sampled_from(["relative", "absolute"]),
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)
def test_ratios_never_fall_or_pass_the_target(
    kind: Kind, seed: int, lowest: int, target: float
) -> None:
    space = ArmSpace(target, step_for(target, 5), lowest, 16, kind)
    bandit = Bandit(Exploration())
    pruned = 0.0
    for number in range(1, 10):
        u, v = bandit.draw(seed, 0, number, space.least(pruned))
        found = space.refinement(u, v, pruned)
        assert pruned <= found.pruned <= target
        assert lowest <= found.rank <= 16
        bandit = bandit.learn(u, v, 0.5, number)
        pruned = found.pruned


@given(st.integers(0, 2**53 - 1).map(lambda number: number / 2**53), st.floats(0.001, 0.999))
def test_what_was_played_stays_within_reach(u: float, target: float) -> None:
    """The cell of the arm that led to a device's present ratio stays playable.

    (u p*) / p* may be above u in floating point. Points have the spacing of NumPy's generator.
    """
    space = ArmSpace(target, 0.1, 2, 32, "absolute")
    pruned = space.refinement(u, 0.5, 0.0).pruned
    assert space.least(pruned) <= u or pruned == target
    assert space.refinement(space.least(pruned), 0.5, pruned).pruned >= pruned


def test_the_step() -> None:
    assert step_for(0.5, 20) == 0.05
    assert step_for(0.9, 1) == 1.0
    assert step_for(0.0, 3) == 1.0
