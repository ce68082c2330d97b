"""What a round takes by the fleet's clock where devices do not cut: of LoRA on a model that all share.

FedSpine's runs say when each round was done. This follows from the same formulas, for each device with its own rank: what is
computed and sent does not depend on the data.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean

from espalier.modeling.opened import open_model
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.fleet import Fleet
from espalier.settings.run import RunSettings
from espalier.wire.plan import ModelPlan
from espalier.wire.tuning import blob_specs, trained
from strategies.engine.virtual_clock import waiting_seconds
from strategies.methods.refining_time import fleet_of, virtual_seconds


def fleet_named(name: str) -> Fleet:
    """A fleet of ``conf/devices``."""
    fleet = fleet_of(name)
    assert fleet is not None
    return fleet


def seconds_of_shared(settings: RunSettings, fleet: Fleet, devices: Sequence[int]) -> list[float]:
    """Seconds until each round's end of LoRA on a model that the devices share, each in every round."""
    return list(accumulate(max(own) for own in _of_rounds(settings, fleet, devices)))


def waiting_of_shared(settings: RunSettings, fleet: Fleet, devices: Sequence[int]) -> float:
    """Seconds for which one of the devices waits in a round for the slowest of them, a mean over both (equation 1)."""
    return fmean(waiting_seconds(own) for own in _of_rounds(settings, fleet, devices))


def _of_rounds(settings: RunSettings, fleet: Fleet, devices: Sequence[int]) -> Iterator[list[float]]:
    """Each device's seconds, round by round."""
    plan = open_model(settings.model).plan
    for number in range(1, settings.federation.rounds + 1):
        yield [_of_device(settings, plan, fleet, client, number) for client in devices]


def _of_device(settings: RunSettings, plan: ModelPlan, fleet: Fleet, client: int, server_round: int) -> float:
    limit = settings.of(AdapterAveraging).rank_limit_of(client, settings.lora)
    adapters = trained(plan, settings, limit)
    up = sum(spec.num_bytes for blob in blob_specs(adapters, settings).values() for spec in blob.values())
    sent = up if server_round == 1 else 2 * up
    return virtual_seconds(fleet, settings, client, server_round, plan.num_parameters, adapters, sent)
