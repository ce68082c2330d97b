"""A fleet of devices that a simulation pretends to have: how fast each computes and how fast its link is, round by round.

FedSpine section 5.1 measures on Jetson kits whose mode is drawn anew every 20 rounds, at distances from the router that set
their bandwidth. A file of ``conf/devices`` says such a fleet in TOML; what is drawn follows from the run's seed, the device and
the round. Speeds are peak rates of the makers, of which training reaches a part only, so that times compare with each other and
with nothing that was measured.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from espalier.amounts import count
from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed
from espalier.settings.table import Table, mistake_lines

ANYWHERE = "any"
"""Place of devices that are dealt out evenly to all places, by the run's seed."""
LEAST = 1e-6
MOST = 1e6
"""Speeds beyond them give times that are no numbers to compare."""


@dataclass(frozen=True)
class Conditions:
    """What a device has in a round."""

    mode: int
    """Number of its mode, of those of its kind."""
    operations_per_second: float
    bits_per_second: float


class DeviceKind(Table):
    """A kind of device: what it can do at most, and the modes it can be switched to."""

    teraflops: float = Field(
        ge=LEAST, le=MOST, description="10^12 operations a second in its fastest mode."
    )
    modes: list[float] = Field(
        min_length=1,
        max_length=64,
        description="Speed of each mode, as a share of the fastest one.",
    )

    @field_validator("modes")
    @classmethod
    def _are_shares(cls, modes: list[float]) -> list[float]:
        if not all(LEAST <= mode <= 1 for mode in modes):
            raise ValueError(f"modes are shares of the fastest one, from {LEAST:g} to 1")
        return modes


class Place(Table):
    """Where devices stand, and what their link gives there."""

    megabits: list[float] = Field(
        min_length=2, max_length=2, description="Least and most megabits a second, both ways."
    )

    @field_validator("megabits")
    @classmethod
    def _ascend(cls, megabits: list[float]) -> list[float]:
        if not LEAST <= megabits[0] <= megabits[1] <= MOST:
            raise ValueError(f"megabits are the least and the most, from {LEAST:g} to {MOST:g}")
        return megabits


class Group(Table):
    """Some devices of one kind."""

    kind: str
    count: int = Field(ge=1, le=100_000)
    place: str = Field(ANYWHERE, description="Name of a place, or `any`.")


class Fleet(Table):
    """Devices, in order: client i has device i."""

    mode_rounds: int = Field(
        20, ge=1, description="Rounds after which every device's mode is drawn anew."
    )
    kinds: dict[str, DeviceKind] = Field(min_length=1)
    places: dict[str, Place] = Field(min_length=1)
    devices: list[Group] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        if ANYWHERE in self.places:
            raise ValueError(
                f"places.{ANYWHERE}: devices whose place is {ANYWHERE} stand in all places in turn;"
                " rename it"
            )
        for number, group in enumerate(self.devices):
            if group.kind not in self.kinds:
                raise ValueError(
                    f"devices.{number}.kind = '{group.kind}': known are {', '.join(self.kinds)}"
                )
            if group.place not in (ANYWHERE, *self.places):
                raise ValueError(
                    f"devices.{number}.place = '{group.place}': known are {ANYWHERE},"
                    f" {', '.join(self.places)}"
                )
        return self

    @property
    def size(self) -> int:
        """How many devices there are."""
        return sum(group.count for group in self.devices)

    def require(self, num_clients: int, key: str = "num-clients") -> None:
        """``Mistake`` where a run has more clients than there are devices."""
        if num_clients > self.size:
            raise Mistake(
                f"{key} = {num_clients}: the fleet has {count(self.size, 'device')}; lower it, or"
                " add devices to the fleet"
            )

    def drawn(self, seed: int, device: int, server_round: int) -> Conditions:
        """What one device has in one round, counted from 1.

        The mode is drawn once for every ``mode_rounds`` rounds, the bandwidth in every round, uniformly. What others draw
        plays no part.

        Raises
        ------
        Mistake
            There is no such device.
        """
        if not 0 <= device < self.size:
            raise Mistake(f"device {device}: the fleet has devices 0 to {self.size - 1}")
        members = [group for group in self.devices for _ in range(group.count)]
        kind = self.kinds[members[device].kind]
        place = self.places[self._places(seed, members)[device]]
        period = (server_round - 1) // self.mode_rounds
        modes = np.random.default_rng(
            derive_seed(seed, "device-mode", client=device, server_round=period)
        )
        links = np.random.default_rng(
            derive_seed(seed, "device-link", client=device, server_round=server_round)
        )
        mode = int(modes.integers(len(kind.modes)))
        least, most = place.megabits
        return Conditions(
            mode, kind.teraflops * kind.modes[mode] * 1e12, float(links.uniform(least, most)) * 1e6
        )

    def _places(self, seed: int, members: list[Group]) -> list[str]:
        """Of each device; those that may be anywhere are shuffled, and dealt out in turn."""
        free = [number for number, group in enumerate(members) if group.place == ANYWHERE]
        order = np.random.default_rng(derive_seed(seed, "device-places")).permutation(len(free))
        names = list(self.places)
        found = [group.place for group in members]
        for turn, chosen in enumerate(order.tolist()):
            found[free[chosen]] = names[turn % len(names)]
        return found


def read_fleet(path: Path) -> Fleet:
    """The fleet of a TOML file.

    Raises
    ------
    Mistake
        There is no such file, it is not TOML, or keys or values are wrong: file, keys and values are named, all at once.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Mistake(f"fleet: there is no {path}; conf/devices has some") from None
    except OSError as error:
        raise Mistake(f"fleet: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"fleet: {path} is not TOML: {error}") from None
    except ValueError as error:  # no file can have the name
        raise Mistake(f"fleet: {str(path)!r} cannot be read: {error}") from None
    try:
        return Fleet.model_validate(document)
    except ValidationError as error:
        lines = mistake_lines(error, ["mode-rounds", "kinds", "places", "devices"])
        # Names that fit no other key, which say for themselves where they stand.
        if not (found := error.errors()[0])["loc"]:
            lines = [found["msg"].removeprefix("Value error, ")]
        raise Mistake("\n  ".join([f"{path} is no fleet:", *lines])) from None
