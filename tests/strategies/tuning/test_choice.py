"""Choice of each device's ratio and rank: schedules by hand, random choice and bandits by seed.

The tests also cover learning and the stored state.
"""

import json
from typing import Any

import pytest

from espalier.settings.run import parse
from strategies.tuning.fedspine.choice import Choices
from strategies.tuning.fedspine.reward import Outcome


def choices(target: float = 0.3, rounds: int = 8, **changes: Any) -> Choices:
    given = {f"fedspine.{key.replace('_', '-')}": value for key, value in changes.items()}
    return Choices(
        parse({"method": "fedspine", "federation.rounds": rounds, "lora.rank": 16, **given}), target
    )


def outcome(pruned: float, before: float = 0.0, seconds: float = 1.0) -> Outcome:
    return Outcome(2.0, 1.5, before, pruned, 2.0, seconds)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"prune_rounds": 3}, [pytest.approx(0.1), pytest.approx(0.2), 0.3, 0.3, 0.3]),
        ({"prune_rounds": 2, "prune_from": 4}, [0.0, 0.0, pytest.approx(0.15), 0.3, 0.3]),
        (
            {
                "allocation": "bandit",
                "adaptive_pruning": False,
                "prune_rounds": 2,
                "prune_from": 4,
            },
            [0.0, 0.0, pytest.approx(0.15), 0.3, 0.3],
        ),
    ],
    ids=["from round 2", "later", "later, with ranks that are chosen"],
)
def test_schedule_takes_equal_steps_to_its_target(
    schedule: dict[str, Any], expected: list[float]
) -> None:
    """The steps are 0.3 in 3 rounds, which a float cannot divide exactly, and in 2 rounds."""
    made = choices(**{"allocation": "fixed", "rank": 5, **schedule})
    seen = []
    for server_round in range(2, 7):
        arm = made.arm(0, server_round)
        seen.append(arm.pruned)
        made.learn({0: arm}, {0: outcome(arm.pruned, arm.before)}, server_round)
        assert arm.rank >= 2 if "adaptive_pruning" in schedule else arm.rank == 5
    assert seen == expected
    assert bool(made.bandits) == ("adaptive_pruning" in schedule)


def test_half_of_rounds_prune_by_default() -> None:
    assert choices(rounds=8).rounds == 4
    assert choices(rounds=3).rounds == 1
    assert choices(rounds=8, prune_rounds=6).rounds == 6
    # The largest step is twice 0.3 / 4.
    assert choices(rounds=8).space.largest_step == pytest.approx(0.15)


@pytest.mark.parametrize("allocation", ["bandit", "random"])
def test_arms_follow_from_seed_device_and_round(allocation: str) -> None:
    made = choices(allocation=allocation)
    arms = {(client, number): made.arm(client, number) for client in range(3) for number in (2, 3)}
    assert arms == {
        (client, number): choices(allocation=allocation).arm(client, number)
        for client, number in arms
    }
    assert len({(arm.u, arm.v) for arm in arms.values()}) == 6
    for arm in arms.values():
        assert arm.pruned == pytest.approx(arm.u * 0.15)
        assert arm.rank == round(2 * 8**arm.v)


def test_schedule_replaces_missing_half() -> None:
    chosen, ratio, rank = (
        choices(**own).arm(1, 2)
        for own in ({}, {"adaptive_pruning": False}, {"adaptive_rank": False})
    )
    assert (ratio.pruned, ratio.rank) == (pytest.approx(0.075), chosen.rank)
    assert (rank.pruned, rank.rank) == (chosen.pruned, 16)


def test_rank_rewards_ignore_schedule_s_steps() -> None:
    """Otherwise, rounds in which the schedule prunes would count less than the others."""
    changes = {"adaptive_pruning": False, "prune_rounds": 2, "prune_from": 4}
    made = choices(**changes)
    seen = []
    for server_round in range(2, 7):
        arms = {client: made.arm(client, server_round) for client in range(2)}
        outcomes = {client: outcome(arm.pruned, arm.before) for client, arm in arms.items()}
        seen += made.learn(arms, outcomes, server_round).values()
    assert set(seen) == {1.0}
    fixed = choices(allocation="fixed", prune_rounds=2, prune_from=4)
    assert fixed.learn({}, {0: outcome(0.0)}, 2) == {0: 0.0}, (
        "nothing is chosen: a step that is none has no reward"
    )
    literal = choices(reward="literal", **changes)
    arms = {0: literal.arm(0, 4)}
    # Equation 3 uses the steps of the schedule.
    assert literal.learn(arms, {0: outcome(arms[0].pruned)}, 4)[0] > 0


def test_disobedient_device_teaches_nothing() -> None:
    made = choices()
    arms = {client: made.arm(client, 2) for client in range(3)}
    outcomes = {
        0: outcome(arms[0].pruned),
        1: outcome(0.0),
        2: outcome(arms[2].pruned, seconds=1.1),
    }
    rewards = made.learn(arms, outcomes, 2)
    assert made.bandits.keys() == {0, 2}
    assert made.bandits[0].history[0].reward == rewards[0] > 0
    assert made.pruned == {0: arms[0].pruned, 1: 0.0, 2: arms[2].pruned}
    assert made.knows(1)
    assert not made.knows(3)


def test_what_is_known_survives_as_text() -> None:
    made = choices()
    for server_round in (2, 3, 4):
        arms = {client: made.arm(client, server_round) for client in range(2)}
        made.learn(
            arms,
            {client: outcome(arm.pruned, arm.before) for client, arm in arms.items()},
            server_round,
        )
    again = choices()
    again.restore(json.loads(json.dumps(made.to_json())))
    assert (again.bandits, again.pruned, again.gains) == (made.bandits, made.pruned, made.gains)
    assert again.arm(1, 5) == made.arm(1, 5)
