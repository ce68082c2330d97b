"""What a round was worth to a device's bandit (FedSpine section 4.1.2, equation 3, and our reading of it).

Equation 3 multiplies the fall of the loss by the step of pruning and by the importance of the LoRA modules, and divides by the
gap between the device's time and the mean. It has no bound, while the bandit's confidence bound is of the order of 1; it is
negative where the loss rises, it has no value where the gap is 0, and it is 0 from when the target is reached.
``scaled_rewards`` has the same four terms, each between 0 and 1; ``literal_rewards`` has the equation itself. No device's
reward depends on the order in which devices are given.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.settings.mistakes import Mistake

LARGEST_REWARD = 1e9
"""Magnitude to which equation 3 is cut, so that sums of rewards stay finite."""


@dataclass(frozen=True)
class Outcome:
    """What a device's round came to."""

    loss_before: float
    """F at the start of the round, nats; a number that is not finite counts as no progress, here and below."""
    loss_after: float
    pruned_before: float
    """p_{t-1}."""
    pruned: float
    """p_t."""
    importance: float
    """I(B_total), see ``factor_importance.comparable``."""
    seconds: float
    """T_i of the round, by the real clock or the virtual one."""
    arrived: bool = False
    """As many units are gone as p* takes, or all that can go, although ``pruned`` may be below it."""


@dataclass(frozen=True)
class UsualGains:
    """The relative falls of the loss in the last rounds, from which it follows what a large one is."""

    rounds: int = 20
    """How many rounds are looked back on, at least 1; the paper knows no such number."""
    quantile: float = 0.9
    seen: tuple[tuple[float, ...], ...] = field(default=())
    """Of each round those of all devices, ascending."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 <= self.quantile <= 1:
            raise Mistake(
                f"gains of {self.rounds} rounds, quantile {self.quantile}: at least 1 round, a"
                " quantile from 0 to 1"
            )

    def and_of(self, outcomes: Mapping[int, Outcome]) -> "UsualGains":
        """With a further round; the earliest one is forgotten where there are too many."""
        seen = (*self.seen, tuple(sorted(gain(outcome) for outcome in outcomes.values())))
        return UsualGains(self.rounds, self.quantile, seen[-self.rounds :])

    @property
    def large(self) -> float:
        """The quantile of all that were seen; 0 where nothing was."""
        flat = [value for values in self.seen for value in values]
        return float(np.quantile(flat, self.quantile)) if flat else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "rounds": self.rounds,
            "quantile": self.quantile,
            "seen": [list(values) for values in self.seen],
        }

    @staticmethod
    def from_json(document: Any) -> "UsualGains":
        """Read what ``to_json`` returned; ``Mistake`` where it is something else."""
        try:
            seen = tuple(tuple(map(float, values)) for values in document["seen"])
            found = UsualGains(int(document["rounds"]), float(document["quantile"]), seen)
        except (KeyError, TypeError, ValueError):
            raise Mistake(
                "the gains in the checkpoint are damaged; resume from another run directory"
            ) from None
        if not all(0 <= value <= 1 for values in seen for value in values):
            raise Mistake(
                "the gains in the checkpoint are not between 0 and 1; resume from another run"
                " directory"
            )
        return found


def gain(outcome: Outcome) -> float:
    """The relative fall of the loss, ``(F_before - F_after) / F_before``, from 0 to 1.

    0 where the loss rose, where one of the two is not finite, and where the former was not above 0.
    """
    before = outcome.loss_before
    after = outcome.loss_after
    if not (math.isfinite(before) and math.isfinite(after) and before > 0):
        return 0.0
    return min(1.0, max(0.0, (before - after) / before))


def scaled_rewards(
    outcomes: Mapping[int, Outcome],
    usual: UsualGains,
    target: float,
    largest_step: float,
    tolerance: float = 0.1,
    *,
    of_steps: bool = True,
) -> dict[int, float]:
    """Rewards from 0 to 1 of the devices of a round.

    The product of four terms. Progress: ``gain`` over ``usual.large``, at most 1; 0 where there was none. Pruning: the step
    over ``largest_step``, at most 1; 1 once the target is reached, by the share or by units, and without ``of_steps``.
    Importance: over the largest of the round; 1 where none is above 0, and 0 for one that is not finite. Time: ``1 / (1 +
    |T_i - mean T| / (tolerance mean T))``; 1 where the mean is 0, and 0 for a time that is not finite or negative, which has
    no part in the mean.

    Parameters
    ----------
    outcomes : by device
    usual : with this round in it
    target, largest_step : p* and Delta_max
    tolerance : kappa, above 0: a device that is off by this share of the mean time gets half
    of_steps : whether steps of pruning are chosen, so that they say something of an arm

    Raises
    ------
    Mistake
        ``tolerance`` or ``largest_step`` is not above 0.
    """
    for name, value in (("tolerance", tolerance), ("largest step", largest_step)):
        if not (math.isfinite(value) and value > 0):
            raise Mistake(f"{name} = {value}: has to be a finite number above 0")
    large = usual.large
    mean = _mean_seconds(outcomes)
    most = max(
        (o.importance for o in outcomes.values() if math.isfinite(o.importance)), default=0.0
    )
    rewards = {}
    for device, outcome in outcomes.items():
        progress = min(1.0, gain(outcome) / large) if large > 0 else float(gain(outcome) > 0)
        step = (outcome.pruned - outcome.pruned_before) / largest_step
        pruning = (
            1.0
            if not of_steps or outcome.arrived or outcome.pruned >= target
            else _share(step, 1.0)
        )
        importance = (
            _share(outcome.importance, most)
            if most > 0
            else float(math.isfinite(outcome.importance))
        )
        rewards[device] = (
            progress * pruning * importance * _timeliness(outcome.seconds, mean, tolerance)
        )
    return rewards


def literal_rewards(
    outcomes: Mapping[int, Outcome], smallest_gap: float = 1e-3
) -> dict[int, float]:
    """Equation 3 itself, ``Delta F Delta p I / |T_i - mean T|``, of the devices of a round.

    Negative where the loss rose, and 0 where nothing was pruned, also at the target: that is the equation. A gap below
    ``smallest_gap``, in seconds, counts as that one. Where any term is not finite the reward is 0, and its magnitude is at most
    ``LARGEST_REWARD``.

    Raises
    ------
    Mistake
        ``smallest_gap`` is not above 0.
    """
    if not (math.isfinite(smallest_gap) and smallest_gap > 0):
        raise Mistake(
            f"smallest gap = {smallest_gap}: has to be a finite number of seconds above 0"
        )
    mean = _mean_seconds(outcomes)
    rewards = {}
    for device, outcome in outcomes.items():
        fall = outcome.loss_before - outcome.loss_after
        step = outcome.pruned - outcome.pruned_before
        found = fall * step * outcome.importance / max(abs(outcome.seconds - mean), smallest_gap)
        known = (
            math.isfinite(outcome.seconds)
            and outcome.seconds >= 0
            and not math.isnan(found)
            and math.isfinite(fall)
        )
        known = known and math.isfinite(outcome.importance)
        rewards[device] = (
            max(-LARGEST_REWARD, min(LARGEST_REWARD, found)) if known and found else 0.0
        )
    return rewards


def _mean_seconds(outcomes: Mapping[int, Outcome]) -> float:
    """Of those that are times; in an order of their own, so that the last bit depends on nobody's place."""
    known = [
        outcome.seconds
        for outcome in outcomes.values()
        if math.isfinite(outcome.seconds) and outcome.seconds >= 0
    ]
    return sum(sorted(value / len(known) for value in known))


def _share(value: float, of: float) -> float:
    """A share from 0 to 1; 0 for what is not finite."""
    return min(1.0, max(0.0, value / of)) if math.isfinite(value) else 0.0


def _timeliness(seconds: float, mean: float, tolerance: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        return 0.0
    return 1 / (1 + abs(seconds - mean) / half) if (half := tolerance * mean) > 0 else 1.0
