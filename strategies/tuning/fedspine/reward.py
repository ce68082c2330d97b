"""Rewards of FedSpine's bandits (section 4.1.2, equation 3, and a bounded variant).

Equation 3 multiplies the decrease of the loss by the pruning step and the importance of the LoRA
modules, and divides by the gap between the device's time and the mean time. It is unbounded, while
the bandit's confidence bound is of order 1. It is negative if the loss rises, undefined if the gap
is 0, and always 0 after the target is reached. ``scaled_rewards`` has the same four terms, each
between 0 and 1; ``literal_rewards`` is the equation itself. Rewards do not depend on the order of
the devices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST_REWARD = 1e9
"""Maximum magnitude of equation 3, so that sums of rewards stay finite."""
SMALLEST_GAP = 1e-3
"""Minimum difference from the mean time in equation 3, in seconds."""


@dataclass(frozen=True)
class Outcome:
    """Measurements of a device's round."""

    loss_before: float
    """Loss F at the start of the round, in nats; a non-finite loss counts as no progress."""
    loss_after: float
    pruned_before: float
    """Pruning ratio p_{t-1} before the round."""
    pruned: float
    """Pruning ratio p_t after the round."""
    importance: float
    """Importance I(B_total) of the LoRA modules, see ``pruning_kernels.lora.importance``."""
    seconds: float
    """Duration T_i of the round in seconds, measured or by the virtual clock."""
    arrived: bool = False
    """True if the device has removed all groups that p* requires, or all that can be removed.

    ``pruned`` may be below p* even then.
    """


def gain(outcome: Outcome) -> float:
    """Return the relative decrease of the loss, ``(F_before - F_after) / F_before``, from 0 to 1.

    It is 0 if the loss rose, if one of the two losses is not finite, or if the first is not
    positive.
    """
    before = outcome.loss_before
    after = outcome.loss_after
    if not (math.isfinite(before) and math.isfinite(after) and before > 0):
        return 0.0
    # Equation 3 is unbounded; the relative decrease is between 0 and 1.
    return min(1.0, max(0.0, (before - after) / before))


GAIN_ROUNDS = 20
"""Number of last rounds whose gains define a large one; this parameter is not in the paper."""
GAIN_QUANTILE = 0.9


def with_gains(
    gains: Sequence[Sequence[float]], outcomes: Mapping[int, Outcome]
) -> list[list[float]]:
    """Return the gains of the last ``GAIN_ROUNDS`` rounds with those of a further round."""
    # Sorted, so that the order of the devices does not change the quantile's bits.
    return [*map(list, gains), sorted(map(gain, outcomes.values()))][-GAIN_ROUNDS:]


def large_gain(gains: Sequence[Sequence[float]]) -> float:
    """Return the quantile of all gains that defines a large one; 0 without gains."""
    flat = [value for values in gains for value in values]
    return float(np.quantile(flat, GAIN_QUANTILE)) if flat else 0.0


KAPPA = 0.1
"""Relative deviation from the mean time at which a device gets half of the reward."""


def scaled_rewards(
    outcomes: Mapping[int, Outcome],
    large: float,
    target: float,
    largest_step: float,
    *,
    of_steps: bool = True,
) -> dict[int, float]:
    """Return rewards from 0 to 1 for the devices of a round.

    A reward is the product of four terms. Progress: ``gain`` divided by ``large``, at most 1;
    0 without a decrease. Pruning: the step divided by ``largest_step``, at most 1; 1 after the
    target is reached (by ratio or by groups), and 1 without ``of_steps``. Importance: relative to
    the largest of the round; 1 if none is positive, 0 if not finite. Time: ``1 / (1 + |T_i - mean
    T| / (kappa mean T))``; 1 if the mean is 0. A time that is not finite or negative gives 0
    and is not part of the mean.

    Parameters
    ----------
    outcomes : outcome of each device
    large : gain that counts as a whole one; see ``large_gain``
    target : target pruning ratio p*
    largest_step : maximum pruning step Delta_max, above 0
    of_steps : whether pruning steps are chosen, so that they say something about an arm
    """
    mean = _mean_seconds(outcomes)
    # Importance that is not finite must not scale the others down.
    max_importance = max(
        (o.importance for o in outcomes.values() if math.isfinite(o.importance)), default=0.0
    )
    rewards = {}
    for device, outcome in outcomes.items():
        # Without any gain so far, each decrease counts as a whole one.
        progress = min(1.0, gain(outcome) / large) if large > 0 else float(gain(outcome) > 0)
        step = (outcome.pruned - outcome.pruned_before) / largest_step
        # After the target no step is possible, so it is not held against the device.
        reached = outcome.arrived or outcome.pruned >= target
        pruning = _share(step, 1.0) if of_steps and not reached else 1.0
        importance = float(math.isfinite(outcome.importance))
        if max_importance > 0:
            importance = _share(outcome.importance, max_importance)
        timeliness = 0.0
        if math.isfinite(outcome.seconds) and outcome.seconds >= 0:
            half = KAPPA * mean
            # Half of the reward at a deviation of ``KAPPA`` times the mean.
            timeliness = 1 / (1 + abs(outcome.seconds - mean) / half) if half > 0 else 1.0
        rewards[device] = progress * pruning * importance * timeliness
    return rewards


def literal_rewards(outcomes: Mapping[int, Outcome]) -> dict[int, float]:
    """Return equation 3, ``Delta F Delta p I / |T_i - mean T|``, for the devices of a round.

    As in the equation, the reward is negative if the loss rose, and 0 if nothing was pruned, also
    at the target. A gap below ``SMALLEST_GAP`` is replaced by it. If a term is not finite, the
    reward is 0; its magnitude is at most ``LARGEST_REWARD``.
    """
    mean = _mean_seconds(outcomes)
    rewards = {}
    for device, outcome in outcomes.items():
        fall = outcome.loss_before - outcome.loss_after
        step = outcome.pruned - outcome.pruned_before
        # A device with exactly the mean time would divide by 0.
        reward = fall * step * outcome.importance / max(abs(outcome.seconds - mean), SMALLEST_GAP)
        terms = (outcome.seconds, fall, outcome.importance)
        valid = all(map(math.isfinite, terms)) and outcome.seconds >= 0 and not math.isnan(reward)
        bounded = max(-LARGEST_REWARD, min(LARGEST_REWARD, reward))
        # ``and reward`` turns -0.0 into 0.0.
        rewards[device] = bounded if valid and reward else 0.0
    return rewards


def _mean_seconds(outcomes: Mapping[int, Outcome]) -> float:
    """Return the mean of the valid times, the same to the last bit for any order of the devices."""
    seconds = [
        outcome.seconds
        for outcome in outcomes.values()
        if math.isfinite(outcome.seconds) and outcome.seconds >= 0
    ]
    # Sorted and divided first: neither order nor overflow changes the result.
    return sum(sorted(value / len(seconds) for value in seconds))


def _share(value: float, of: float) -> float:
    """Return ``value / of`` limited to 0 to 1; 0 if ``value`` is not finite."""
    return min(1.0, max(0.0, value / of)) if math.isfinite(value) else 0.0
