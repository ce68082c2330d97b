"""Virtual clock: computed time of a round on other devices than those of the simulation.

A simulation runs on one machine, so its measured seconds do not describe a heterogeneous fleet
(FedSpine section 5.1). Here the time of a round follows from the numbers of operations and bytes
and from the speed of each device (``espalier.settings.fleet``). No clock is read. The paper
measures on development kits, where memory, caches and drivers take time too; this model counts
multiplications and additions only.
"""

import math
from collections.abc import Mapping, Sequence

from espalier.settings.fleet import Conditions

FROZEN = 4
TRAINED = 6
"""Operations per parameter and token of a training step.

A frozen parameter takes 2 in the forward pass and 2 in the backward pass to the inputs. A trained
parameter takes 2 more for its gradient.
"""


def computing_seconds(
    steps: int, tokens: int, kept: int, trained: int, conditions: Conditions
) -> float:
    """Return the seconds of local training, ``steps tokens (4 P_kept + 6 P_lora) / speed``.

    Parameters
    ----------
    steps : number of steps in the round
    tokens : number of tokens in a step
    kept : number of frozen parameters that the device has after pruning; removed ones cost nothing
    trained : number of trained parameters: LoRA adapters and others, such as a classification head
    conditions : speed of the device in this round

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
    """Return the seconds to send ``num_bytes``, download plus upload: ``8 bytes / bandwidth``.

    Raises
    ------
    ValueError
        ``num_bytes`` is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"bytes are at least 0, got {num_bytes}")
    return 8 * num_bytes / conditions.bits_per_second


def round_seconds(seconds: Mapping[int, float] | Sequence[float]) -> float:
    """Return the duration of a round in seconds: that of its slowest device, 0 without devices."""
    return max(_times(seconds), default=0.0)


def waiting_seconds(seconds: Mapping[int, float] | Sequence[float]) -> float:
    """Return the mean time that devices wait for the slowest one (equation 1), 0 without devices.

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
