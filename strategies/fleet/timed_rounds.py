"""Time of each round and device, by the virtual clock of a simulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from espalier.amounts import duration
from espalier.errors import InputError
from strategies.base.run import Run
from strategies.fleet.training_time import fingerprint_of, fleet_of_run
from strategies.fleet.virtual_clock import round_seconds, waiting_seconds


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
        """Return the entry of a round with these devices."""
        seconds = [own.seconds for own in devices.values()]
        return cls(server_round, round_seconds(seconds), waiting_seconds(seconds), devices)

    def in_words(self) -> str:
        """Return the duration and the waiting time as text, for a progress line."""
        return (
            f"{duration(self.seconds, tenths=True)} of a round,"
            f" {duration(self.waiting_seconds, tenths=True)} of waiting"
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {
            "devices": {str(client): asdict(own) for client, own in self.devices.items()}
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read the values that ``to_json`` returned.

        Raises
        ------
        InputError
            They are damaged.
        """
        try:
            devices = {
                int(client): cls.DEVICE(**own) for client, own in document["devices"].items()
            }
            return cls(document["round"], document["seconds"], document["waiting_seconds"], devices)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                "a round's note in the checkpoint is damaged; resume from another run directory"
            ) from None


class FleetClock:
    """Virtual clock of the devices that a run simulates, and its entries in the ledger."""

    def __init__(self, run: Run) -> None:
        self.fleet = fleet_of_run(run.settings, simulation=run.simulation)
        """Simulated devices; None if the run has no virtual clock."""
        self.fingerprint = fingerprint_of(self.fleet)
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
                for client, own in note.devices.items():
                    self._run.folder.ledger.record_round(
                        self._run.lineage, note.round, client, own.seconds
                    )
                self._recorded = note.round


def seconds_of_all(rounds: Sequence[RoundTime]) -> float:
    """Return the total seconds of the rounds, each as long as its slowest device."""
    return sum(note.seconds for note in rounds)
