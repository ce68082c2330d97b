"""Time of each round and device, by the virtual clock of a simulated fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from espalier.amounts import duration
from espalier.errors import InputError
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


def seconds_of_all(rounds: Sequence[RoundTime]) -> float:
    """Return the total seconds of the rounds, each as long as its slowest device."""
    return sum(note.seconds for note in rounds)
