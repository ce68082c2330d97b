"""How long a device's round of LoRA takes by the clock of a pretended fleet: T of FedSpine's equations 1 and 3.

The time follows from what is computed and sent, so that it is the same in every run. What is sent counts as the contracts have
it: numbers of adapters and bits, both ways, without headers and scalars.
"""

from pathlib import Path

from espalier.settings.fleet import Fleet, read_fleet
from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.settings.timed import TimedSettings
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
    named = {path.stem: path for path in FLEETS.glob("*.toml")}
    return read_fleet(named.get(name) or at_home(name))


def fleet_of_run(settings: RunSettings, *, simulation: bool) -> Fleet | None:
    """The fleet that a run pretends to have; None where its method has no clock, or another one.

    Raises
    ------
    Mistake
        There is none of the name, it is wrong, or it has too few devices.
    """
    job = settings.job
    name = job.fleet_name(simulation=simulation) if isinstance(job, TimedSettings) else ""
    try:
        fleet = fleet_of(name)
        if fleet is not None:
            fleet.require(settings.num_clients)
    except Mistake as mistake:
        assert isinstance(job, TimedSettings)
        meant = "" if job.fleet == name else f" (in a simulation {name})"
        reason = str(mistake).removeprefix("fleet: ")
        raise Mistake(f"{settings.method}.fleet = '{job.fleet}'{meant}: {reason}") from None
    return fleet


def require_fleet(settings: RunSettings) -> None:
    """Refuse a fleet that is not there, or has too few devices, where it is named; of `auto` whoever knows of a simulation."""
    if isinstance(settings.job, TimedSettings) and settings.job.fleet_is_named:
        fleet_of_run(settings, simulation=False)


def fingerprint_of(fleet: Fleet | None) -> str:
    """SHA-256 of what a fleet is, empty without one: a resumed run must go on with the same."""
    return sha256(fleet.model_dump_json().encode()) if fleet is not None else ""


def bytes_of_round(adapters: AdapterPlan, settings: RunSettings, server_round: int) -> int:
    """Bytes of numbers that a device gets and sends in a round; in round 1 nothing comes down."""
    up = sum(
        spec.num_bytes for blob in blob_specs(adapters, settings).values() for spec in blob.values()
    )
    return up if server_round == 1 else 2 * up


def bytes_of_bits(
    adapters: AdapterPlan, units: CutUnits, settings: RunSettings, server_round: int, *, asked: bool
) -> int:
    """Bytes of what a device has cut, in a round after the first: they come with every part of the adapters and with every
    request for one, the first aside, which is the order itself; and they go once each way where it is asked what to cut.
    """
    bits = sum(spec.num_bytes for spec in units.specs.values())
    return 0 if server_round == 1 else bits * (2 * len(parts(adapters, settings)) - 1 + 2 * asked)


def virtual_seconds(
    fleet: Fleet,
    settings: RunSettings,
    client: int,
    server_round: int,
    kept: int,
    adapters: AdapterPlan,
    num_bytes: int,
) -> float:
    """Seconds of a device's round: its steps over full sequences, and its bytes.

    ``kept`` are the parameters of the frozen model that it still has.
    """
    training = settings.training
    sequence = (
        settings.data.window_tokens if settings.task.name == TEXT else settings.task.max_tokens
    )
    tokens = training.batch_size * training.accumulation * sequence
    conditions = fleet.drawn(settings.seed, client, server_round)
    computing = computing_seconds(training.steps, tokens, kept, adapters.num_parameters, conditions)
    return computing + sending_seconds(num_bytes, conditions)
