"""What a run takes by the clock of another fleet than the one that it pretended to have, where times do not change its course.

Ratios and ranks that bandits choose follow from times; a schedule's do not, nor does LoRA of the whole model. With another
fleet such a run would compute and send the same, and its seconds are arithmetic (``strategies.engine.virtual_clock``): they are
worked out from the operations and bytes of each device's rounds, and nothing is trained again.
"""

from collections.abc import Mapping
from typing import Any

from espalier.settings.fedspine import FedSpineSettings
from espalier.settings.fleet import Conditions, Fleet
from espalier.settings.run import RunSettings
from strategies.engine.virtual_clock import sending_seconds
from strategies.results.timed import DeviceTime, RoundTime


def depends_on_times(settings: RunSettings) -> bool:
    """Whether what a run does depends on how long its devices take."""
    return settings.method == "fedspine" and settings.of(FedSpineSettings).allocation == "bandit"


def retimed(summary: Mapping[str, Any], fleet: Fleet, other: Fleet) -> list[RoundTime]:
    """The rounds of a run by another fleet's clock.

    Parameters
    ----------
    summary : ``summary.json`` of the run
    fleet : whose clock the run had
    other : another, of as many devices or more
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
    """Of a device's round: as many operations and bytes."""
    operations = max(0.0, seconds - sending_seconds(num_bytes, had)) * had.operations_per_second
    return operations / has.operations_per_second + sending_seconds(num_bytes, has)
