"""Virtual time of a simulated fleet of devices.

A simulation runs on one machine, so its measured seconds do not describe a heterogeneous fleet
(FedSpine section 5.1). Here the time of a round follows from the numbers of operations and bytes
and from the speed of each device (``espalier.settings.tables.fleet``), so it is the same in every
run. The paper measures on development kits, where memory, caches and drivers take time too; this
model counts multiplications and additions only. Bytes are those of the contracts: adapters and cut
bits, both ways, without headers and other fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from espalier.amounts import duration
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.messages.blobs.cut_bits import bit_specs
from espalier.methods.tuning.adapters.tensors import blob_specs, parts
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Groups
from espalier.settings.run import RunSettings
from espalier.settings.tables.fleet import Conditions, Fleet, read_fleet
from espalier.storage.blobs import sha256
from strategies.base.run import Run

FROZEN = 4
TRAINED = 6
"""Operations per parameter and token of a training step.

A frozen parameter takes 2 in the forward pass and 2 in the backward pass to the inputs. A trained
parameter takes 2 more for its gradient.
"""


def training_operations(tokens: int, kept: int, trained: int) -> int:
    """Return the operations of training on a number of tokens, ``tokens (4 P_kept + 6 P_lora)``.

    ``kept`` is the number of the frozen parameters after pruning, and ``trained`` that of the
    trained ones: LoRA adapters and others, such as a classification head.
    """
    return tokens * (FROZEN * kept + TRAINED * trained)


def sending_seconds(num_bytes: int, conditions: Conditions) -> float:
    """Return the seconds to send ``num_bytes``, download plus upload: ``8 bytes / bandwidth``."""
    return 8 * num_bytes / conditions.bits_per_second


FLEETS = Path(__file__).parents[1] / "conf" / "devices"
"""Folder of the named fleets."""


def fleet_of(name: str) -> Fleet | None:
    """Return the fleet with a name of ``conf/devices`` or in a file; None if the name is empty.

    Raises InputError if the fleet does not exist or is not valid.
    """
    if not name:
        return None
    presets = {path.stem: path for path in FLEETS.glob("*.toml")}
    return read_fleet(presets.get(name) or at_home(name))


def fleet_of_run(settings: RunSettings, *, simulation: bool) -> Fleet | None:
    """Return the fleet that a run simulates; None if its method has no virtual clock or it is off.

    Raises InputError if the fleet does not exist, is not valid, or has too few devices.
    """
    name = settings.federation.fleet_name(settings.job, simulation=simulation)
    try:
        fleet = fleet_of(name)
        if fleet is not None:
            fleet.require(settings.num_clients)
    except EspalierError as error:
        setting = settings.federation.fleet
        meant = "" if setting == name else f" (in a simulation {name})"
        reason = str(error).removeprefix("fleet: ")
        raise InputError(f"federation.fleet = '{setting}'{meant}: {reason}") from None
    return fleet


def bytes_of_round(
    sent: AdapterPlan, received: AdapterPlan, settings: RunSettings, server_round: int
) -> int:
    """Return the bytes of adapters that a device receives and sends; round 1 has no download."""
    # In round 1 the seed determines the adapters.
    both = [sent] if server_round == 1 else [sent, received]
    specs = [spec for plan in both for spec in blob_specs(plan, settings).values()]
    return sum(spec.num_bytes for blob in specs for spec in blob.values())


def bytes_of_bits(
    adapters: AdapterPlan, groups: Groups, settings: RunSettings, server_round: int, *, asked: bool
) -> int:
    """Return the bytes of cut bits that a device receives and sends in a round; 0 in round 1.

    They travel with each part of the adapters and each request for a part. A device that is asked
    to cut receives and sends them once more.
    """
    bits = sum(spec.num_bytes for spec in bit_specs(groups).values())
    # All n parts of the download have the bits, and so have the n - 1 requests for further parts of
    # the reply.
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
    # Bandwidth and speed vary by round, from the run's seed.
    conditions = fleet.drawn(settings.seed, client, server_round)
    operations = training_operations(settings.tokens_of_round, kept, adapters.num_parameters)
    computing = operations / conditions.operations_per_second
    return computing + sending_seconds(num_bytes, conditions)


@dataclass(frozen=True)
class DeviceTime:
    """Time and bytes of a round at one device."""

    seconds: float
    num_bytes: int
    """Bytes of adapters and cut bits on the wire, both ways, without headers and other fields."""


@dataclass(frozen=True)
class RoundTime:
    """Time of a round."""

    DEVICE: ClassVar[type[DeviceTime]] = DeviceTime

    round: int
    seconds: float
    """Seconds until the slowest device had finished."""
    waiting_seconds: float
    """Mean waiting time Gamma in seconds (FedSpine's equation 1)."""
    devices: Mapping[int, Any]
    """Values of each device, by client, ascending."""

    @classmethod
    def of(cls, server_round: int, devices: Mapping[int, DeviceTime]) -> Self:
        """Return the entry of a round with these devices (FedSpine's equation 1)."""
        seconds = [device.seconds for device in devices.values()]
        slowest = max(seconds, default=0.0)
        # ``fsum`` is exact, so the order of the devices has no effect.
        waiting = math.fsum(slowest - value for value in seconds) / max(1, len(seconds))
        return cls(server_round, slowest, waiting, devices)

    def in_words(self) -> str:
        """Return the duration and the waiting time as text, for a progress line."""
        return (
            f"{duration(self.seconds, tenths=True)} of a round,"
            f" {duration(self.waiting_seconds, tenths=True)} of waiting"
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {
            "devices": {str(client): asdict(device) for client, device in self.devices.items()}
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read the values that ``to_json`` returned."""
        devices = {
            int(client): cls.DEVICE(**fields) for client, fields in document["devices"].items()
        }
        return cls(**{**document, "devices": devices})


class FleetClock:
    """Virtual clock of the devices that a run simulates, and its entries in the ledger."""

    def __init__(self, run: Run) -> None:
        self.fleet = fleet_of_run(run.settings, simulation=run.simulation)
        """Simulated devices; None if the run has no virtual clock."""
        self.fingerprint = sha256(self.fleet.model_dump_json().encode()) if self.fleet else ""
        """SHA-256 of the fleet, empty without one; a resumed run must have the same."""
        self._run = run
        self._recorded = 0
        """Last round whose times this process wrote to the ledger."""

    def require_same(self, fingerprint: str) -> None:
        """Raise InputError if a resumed run began with another fleet."""
        if fingerprint != self.fingerprint:
            raise InputError(
                "federation.fleet: is not the fleet that the run began with; restore its file,"
                " or start a new run (resume-from = '')"
            )

    def record(self, rounds: Sequence[RoundTime]) -> None:
        """Write the virtual times of rounds to the ledger, unless they are there already.

        It is called after the checkpoint of these rounds, so that a round that is repeated after a
        resumption has no times of its first attempt.
        """
        for note in rounds if self.fleet is not None else ():
            if note.round > self._recorded:
                for client, device in note.devices.items():
                    self._run.folder.ledger.record_round(
                        self._run.lineage, note.round, client, device.seconds
                    )
                self._recorded = note.round


def seconds_of_all(rounds: Sequence[RoundTime]) -> float:
    """Return the total seconds of the rounds, each as long as its slowest device."""
    return sum(note.seconds for note in rounds)
