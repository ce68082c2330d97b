"""What rounds took by the clock of a fleet that the run pretends to have, device by device."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from espalier.amounts import duration
from espalier.settings.mistakes import Mistake
from strategies.engine.virtual_clock import round_seconds, waiting_seconds


@dataclass(frozen=True)
class DeviceTime:
    """What a round took at one device."""

    seconds: float
    num_bytes: int
    """Of adapters, and of bits of what is cut, on the wire, both ways, without headers and scalars."""


@dataclass(frozen=True)
class RoundTime:
    """What a round took."""

    DEVICE: ClassVar[type[DeviceTime]] = DeviceTime

    round: int
    seconds: float
    """Until the slowest device was done."""
    waiting_seconds: float
    """Gamma (FedSpine's equation 1)."""
    devices: Mapping[int, Any]
    """What it came to at each device, by client, ascending."""

    @classmethod
    def of(cls, server_round: int, devices: Mapping[int, DeviceTime]) -> Self:
        """The note of a round of these devices."""
        seconds = [own.seconds for own in devices.values()]
        return cls(server_round, round_seconds(seconds), waiting_seconds(seconds), devices)

    def in_words(self) -> str:
        """How long it was, for the progress."""
        return (
            f"{duration(self.seconds, tenths=True)} of a round,"
            f" {duration(self.waiting_seconds, tenths=True)} of waiting"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {
            "devices": {str(client): asdict(own) for client, own in self.devices.items()}
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read what ``to_json`` returned.

        Raises
        ------
        Mistake
            It is damaged.
        """
        try:
            devices = {
                int(client): cls.DEVICE(**own) for client, own in document["devices"].items()
            }
            return cls(document["round"], document["seconds"], document["waiting_seconds"], devices)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Mistake(
                "a round's note in the checkpoint is damaged; resume from another run directory"
            ) from None


def seconds_of_all(rounds: Sequence[RoundTime]) -> float:
    """Of all rounds together, each as long as its slowest device."""
    return sum(note.seconds for note in rounds)
