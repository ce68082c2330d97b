"""How long a device's round takes: T of FedSpine's equations 1 and 3, by the clock of a fleet that a run pretends to have.

The time follows from what is computed and sent, so that it is the same in every run. What is sent counts as the contracts have
it: numbers of adapters and bits, both ways, without headers and scalars.
"""

from pathlib import Path

from espalier.settings.fleet import Fleet, read_fleet
from espalier.settings.home import at_home
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.storage.blobs import sha256
from espalier.wire.adapters import AdapterPlan
from espalier.wire.cut_units import CutUnits
from espalier.wire.tuning import blob_specs, parts
from strategies.engine.virtual_clock import computing_seconds, sending_seconds

FLEETS = Path(__file__).parents[2] / "conf" / "devices"
"""Where fleets lie that have a name."""


def fleet_of(name: str) -> Fleet | None:
    """The fleet of the setting ``fleet``: one of ``conf/devices`` by its name, or a file; None where times are measured.

    Raises
    ------
    Mistake
        There is none, or it is wrong.
    """
    if not name:
        return None
    named = FLEETS / f"{name}.toml"
    return read_fleet(named if named.is_file() else at_home(name))


def fingerprint_of(fleet: Fleet | None) -> str:
    """SHA-256 of what a fleet is, empty without one: a resumed run must go on with the same."""
    return sha256(fleet.model_dump_json().encode()) if fleet is not None else ""


def bytes_of_round(adapters: AdapterPlan, units: CutUnits, settings: RunSettings, server_round: int, *, asked: bool) -> int:
    """Bytes of numbers and bits that a device gets and sends in a round.

    In round 1 nothing comes down. Later bits come with every part of the adapters and with every request for one, the first
    aside, which is the order itself; and they go once each way where the device is asked what to cut.
    """
    up = sum(spec.num_bytes for blob in blob_specs(adapters, settings).values() for spec in blob.values())
    bits = sum(spec.num_bytes for spec in units.specs.values())
    return up if server_round == 1 else 2 * up + bits * (2 * len(parts(adapters, settings)) - 1 + 2 * asked)


def virtual_seconds(
    fleet: Fleet, settings: RunSettings, client: int, server_round: int, kept: int, adapters: AdapterPlan, num_bytes: int
) -> float:
    """Seconds of a device's round: its steps over full sequences, and its bytes.

    ``kept`` are the parameters of the frozen model that it still has.
    """
    training = settings.training
    sequence = settings.data.window_tokens if settings.task.name == TEXT else settings.task.max_tokens
    tokens = training.batch_size * training.accumulation * sequence
    conditions = fleet.drawn(settings.seed, client, server_round)
    computing = computing_seconds(training.steps, tokens, kept, adapters.num_parameters, conditions)
    return computing + sending_seconds(num_bytes, conditions)
