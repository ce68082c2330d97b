"""Virtual times of a finished run with another fleet than its own.

The ratios and ranks of bandits depend on times; those of a schedule, and LoRA of the whole model,
do not. With another fleet, such a run would compute and send the same. Its seconds follow from the
operations and bytes of each device's rounds (``strategies.fleet``), without training
again.
"""

from collections.abc import Mapping
from typing import Any

from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.fleet import Conditions, Fleet
from strategies.fleet import DeviceTime, RoundTime, sending_seconds


def depends_on_times(settings: RunSettings) -> bool:
    """Return whether the course of a run depends on the times of its devices."""
    return settings.method == "fedspine" and settings.of(FedSpineSettings).allocation == "bandit"


def retimed(summary: Mapping[str, Any], fleet: Fleet, other: Fleet) -> list[RoundTime]:
    """Return the rounds of a run by the clock of another fleet.

    Parameters
    ----------
    summary : ``summary.json`` of the run
    fleet : fleet of the run
    other : other fleet, with at least as many devices
    """
    rounds: dict[int, dict[int, DeviceTime]] = {}
    for client in summary["clients"]:
        for own in client["rounds"]:
            place = summary["seed"], client["client"], own["round"]
            seconds = _seconds(
                own["virtual_seconds"], own["bytes"], fleet.drawn(*place), other.drawn(*place)
            )
            rounds.setdefault(own["round"], {})[client["client"]] = DeviceTime(
                seconds, own["bytes"]
            )
    return [RoundTime.of(number, devices) for number, devices in sorted(rounds.items())]


def _seconds(seconds: float, num_bytes: int, had: Conditions, has: Conditions) -> float:
    """Return the seconds of a device's round with the same operations and bytes."""
    operations = max(0.0, seconds - sending_seconds(num_bytes, had)) * had.operations_per_second
    return operations / has.operations_per_second + sending_seconds(num_bytes, has)
