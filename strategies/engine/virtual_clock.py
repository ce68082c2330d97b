"""Time that a round would take on other devices than those that compute: arithmetic, no clock is read.

A simulation runs on one machine, so its own seconds say nothing of a heterogeneous fleet (FedSpine section 5.1). Here a round's
time follows from what was computed and sent, and from what each device can do (``espalier.settings.fleet``). What the paper
measures on real kits also has memory, caches and drivers in it; the constants below count multiplications and additions alone.
"""

import math
from collections.abc import Mapping, Sequence

from espalier.settings.fleet import Conditions

FROZEN = 4
TRAINED = 6
"""Operations per parameter and token of a step: 2 forward, 2 backward to the inputs, and 2 more to a trained parameter."""


def computing_seconds(
    steps: int, tokens: int, kept: int, trained: int, conditions: Conditions
) -> float:
    """Seconds of local training, ``steps tokens (4 P_kept + 6 P_lora) / speed``.

    Parameters
    ----------
    steps, tokens : of the round, and of a step
    kept : frozen parameters that the device still has; pruned ones cost nothing
    trained : of its LoRA adapters, and what else it trains

    Raises
    ------
    ValueError
        A number is negative.
    """
    if min(steps, tokens, kept, trained) < 0:
        raise ValueError(
            f"steps, tokens and parameters are at least 0, got {steps}, {tokens}, {kept} and"
            f" {trained}"
        )
    return steps * tokens * (FROZEN * kept + TRAINED * trained) / conditions.operations_per_second


def sending_seconds(num_bytes: int, conditions: Conditions) -> float:
    """Seconds that bytes take, down and up together, ``8 bytes / bandwidth``.

    Raises
    ------
    ValueError
        Their number is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"bytes are at least 0, got {num_bytes}")
    return 8 * num_bytes / conditions.bits_per_second


def round_seconds(seconds: Mapping[int, float] | Sequence[float]) -> float:
    """How long the round lasts: as long as its slowest device; 0 without devices."""
    return max(_times(seconds), default=0.0)


def waiting_seconds(seconds: Mapping[int, float] | Sequence[float]) -> float:
    """Mean time that devices wait for the slowest one (equation 1); 0 without devices.

    Raises
    ------
    ValueError
        A time is negative or not finite.
    """
    times = _times(seconds)
    slowest = max(times, default=0.0)
    return math.fsum(slowest - time for time in times) / len(times) if times else 0.0


def _times(seconds: Mapping[int, float] | Sequence[float]) -> list[float]:
    times = list(seconds.values() if isinstance(seconds, Mapping) else seconds)
    if bad := [time for time in times if not (math.isfinite(time) and time >= 0)]:
        raise ValueError(f"times of a round are finite and at least 0, {bad[0]} is not")
    return times
