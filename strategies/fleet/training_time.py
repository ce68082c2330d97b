"""Virtual time of a device's LoRA round: T in FedSpine's equations 1 and 3.

The time follows from the numbers of operations and bytes, so it is the same in every run. Bytes are
those of the contracts: adapters and cut bits, both ways, without headers and other fields.
"""

from pathlib import Path

from espalier.environment.home_folder import at_home
from espalier.errors import EspalierError, InputError
from espalier.messages.blobs.group_bits import bit_specs
from espalier.methods.fedpetuning import blob_specs, parts
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Groups
from espalier.settings.fleet import Fleet, read_fleet
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.storage.blobs import sha256
from strategies.fleet.virtual_clock import computing_seconds, sending_seconds

FLEETS = Path(__file__).parents[2] / "conf" / "devices"
"""Folder of the named fleets."""


def fleet_of(name: str) -> Fleet | None:
    """Return the fleet of the setting ``fleet``; None if times are measured.

    ``name`` is a fleet of ``conf/devices`` or the path of a file.

    Raises
    ------
    InputError
        The fleet does not exist or is not valid.
    """
    if not name:
        return None
    named = {path.stem: path for path in FLEETS.glob("*.toml")}
    return read_fleet(named.get(name) or at_home(name))


def fleet_of_run(settings: RunSettings, *, simulation: bool) -> Fleet | None:
    """Return the fleet that a run simulates; None if its method has no virtual clock or it is off.

    Raises
    ------
    InputError
        The fleet does not exist, is not valid, or has too few devices.
    """
    name = settings.federation.fleet_name(settings.job, simulation=simulation)
    try:
        fleet = fleet_of(name)
        if fleet is not None:
            fleet.require(settings.num_clients)
    except EspalierError as error:
        given = settings.federation.fleet
        meant = "" if given == name else f" (in a simulation {name})"
        reason = str(error).removeprefix("fleet: ")
        raise InputError(f"federation.fleet = '{given}'{meant}: {reason}") from None
    return fleet


def require_fleet(settings: RunSettings) -> None:
    """Refuse a named fleet that does not exist or has too few devices.

    The value ``auto`` is checked later, because it depends on whether the run is a simulation.
    """
    fleet_of_run(settings, simulation=False)


def fingerprint_of(fleet: Fleet | None) -> str:
    """Return the SHA-256 of a fleet, empty without one; a resumed run must have the same."""
    return sha256(fleet.model_dump_json().encode()) if fleet is not None else ""


def bytes_of_round(adapters: AdapterPlan, settings: RunSettings, server_round: int) -> int:
    """Return the bytes of adapters that a device receives and sends; round 1 has no download."""
    up = sum(
        spec.num_bytes for blob in blob_specs(adapters, settings).values() for spec in blob.values()
    )
    return up if server_round == 1 else 2 * up


def bytes_of_bits(
    adapters: AdapterPlan, groups: Groups, settings: RunSettings, server_round: int, *, asked: bool
) -> int:
    """Return the bytes of cut bits that a device receives and sends in a round; 0 in round 1.

    They travel with each part of the adapters and each request for a part; the order itself is the
    first request. A device that is asked to cut receives and sends them once more.
    """
    bits = sum(spec.num_bytes for spec in bit_specs(groups).values())
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
    """Return the seconds of a device's round: its steps over full sequences, plus its bytes.

    ``kept`` is the number of parameters of the frozen model that the device still has.
    """
    training = settings.training
    sequence = (
        settings.data.sequence_length if settings.task.name == TEXT else settings.task.max_tokens
    )
    tokens = training.batch_size * training.accumulation * sequence
    conditions = fleet.drawn(settings.seed, client, server_round)
    computing = computing_seconds(training.steps, tokens, kept, adapters.num_parameters, conditions)
    return computing + sending_seconds(num_bytes, conditions)
