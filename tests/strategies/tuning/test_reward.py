"""Rewards of a round by hand, and all cases in which a term is not a number."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.tuning.fedspine.reward import (
    GAIN_ROUNDS,
    LARGEST_REWARD,
    Outcome,
    gain,
    large_gain,
    literal_rewards,
    scaled_rewards,
    with_gains,
)

PLAIN = Outcome(
    loss_before=2.0, loss_after=1.5, pruned_before=0.1, pruned=0.15, importance=3.0, seconds=10.0
)
ANY = st.one_of(
    st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 5e-324])
)


def test_scaled_on_paper() -> None:
    """Device 0 has the largest loss gain, 1/4, and half a step; device 1 has 1/8 and a whole step.

    The importance of device 0 is half of 6. The times of 8 s and 12 s differ by 20% from their mean
    of 10 s, which is twice kappa.
    """
    outcomes = {
        0: replace(PLAIN, seconds=8.0),
        1: Outcome(
            loss_before=2.0,
            loss_after=1.75,
            pruned_before=0.1,
            pruned=0.2,
            importance=6.0,
            seconds=12.0,
        ),
    }
    found = scaled_rewards(outcomes, large=0.25, target=0.5, largest_step=0.1)
    assert found == {0: pytest.approx(1 * 0.5 * 0.5 / 3), 1: pytest.approx(0.5 * 1 * 1 / 3)}


def test_literal_on_paper() -> None:
    """0.5 * 0.05 * 3 divided by a gap of 2 s; a loss that rises by 0.5 gives the negative value."""
    found = literal_rewards(
        {0: replace(PLAIN, seconds=8.0), 1: replace(PLAIN, loss_after=2.5, seconds=12.0)}
    )
    assert found == {0: pytest.approx(0.0375), 1: pytest.approx(-0.0375)}


def test_bad_cases_of_the_scaled_reward() -> None:
    def one(**changed: float) -> float:
        outcomes = {0: replace(PLAIN, **changed)}
        return scaled_rewards(outcomes, gain(PLAIN), 0.5, 0.05)[0]

    assert one() == pytest.approx(1)
    assert one(loss_after=2.5) == 0
    assert one(pruned=0.1) == 0
    assert one(pruned=0.5, pruned_before=0.5) == pytest.approx(1), "the target is reached"
    assert one(pruned=0.4999, pruned_before=0.4998, arrived=True) == pytest.approx(1), (
        "by units it is"
    )
    assert one(pruned=0.4999, pruned_before=0.4998) < 0.01
    for bad in (math.nan, math.inf):
        for name in ("loss_before", "loss_after", "importance", "seconds"):
            assert one(**{name: bad}) == 0
    assert one(loss_before=0.0) == 0
    assert one(seconds=-1.0) == 0
    assert one(seconds=0.0) == pytest.approx(1), "all are as fast"
    assert one(importance=0.0) == pytest.approx(1), "nobody's modules are worth anything yet"
    assert scaled_rewards({}, 0.25, 0.5, 0.1) == {}


def test_gain_without_usual_ones_is_whole() -> None:
    outcomes = {0: PLAIN, 1: replace(PLAIN, loss_after=2.0)}
    assert scaled_rewards(outcomes, 0.0, 0.5, 0.05) == {0: pytest.approx(1), 1: 0}


def test_bad_cases_of_the_literal_reward() -> None:
    assert literal_rewards({0: PLAIN}) == {0: pytest.approx(0.5 * 0.05 * 3 / 1e-3)}, (
        "no gap: the smallest one"
    )
    assert literal_rewards({0: replace(PLAIN, pruned=0.1)}) == {0: 0}
    assert literal_rewards({0: replace(PLAIN, importance=1e300)}) == {0: LARGEST_REWARD}
    assert literal_rewards({0: replace(PLAIN, importance=1e300, loss_after=9.0)}) == {
        0: -LARGEST_REWARD
    }
    for bad in (math.nan, math.inf):
        for name in ("loss_before", "loss_after", "importance", "seconds"):
            assert literal_rewards({0: replace(PLAIN, **{name: bad}), 1: PLAIN})[0] == 0
    assert literal_rewards({}) == {}


@given(
    st.dictionaries(
        st.integers(0, 9), st.builds(Outcome, ANY, ANY, st.just(0.1), st.floats(0.1, 0.5), ANY, ANY)
    )
)
def test_rewards_do_not_depend_on_device_order(
    outcomes: dict[int, Outcome],
) -> None:
    backwards = dict(reversed(outcomes.items()))
    gains = with_gains([], outcomes)
    assert gains == with_gains([], backwards)
    large = large_gain(gains)
    found = scaled_rewards(outcomes, large, 0.5, 0.1)
    assert found == scaled_rewards(backwards, large, 0.5, 0.1)
    assert all(0 <= reward <= 1 for reward in found.values())
    literal = literal_rewards(outcomes)
    assert literal == literal_rewards(backwards)
    assert all(abs(reward) <= LARGEST_REWARD for reward in literal.values())


def test_gains_are_remembered_for_some_rounds() -> None:
    """The 90th percentile of 0, 0.1, ..., 1 is 0.9."""
    assert large_gain([]) == 0
    ten = {
        number: replace(PLAIN, loss_before=10.0, loss_after=10.0 - number) for number in range(11)
    }
    gains = with_gains([], ten)
    assert large_gain(gains) == pytest.approx(0.9)
    for _ in range(GAIN_ROUNDS):
        assert gains[0] == [number / 10 for number in range(11)]
        gains = with_gains(gains, {0: replace(PLAIN, loss_after=2.0)})
    assert gains == [[0.0]] * GAIN_ROUNDS


def test_the_gain() -> None:
    assert gain(PLAIN) == 0.25
    assert gain(replace(PLAIN, loss_after=-9.0)) == 1
