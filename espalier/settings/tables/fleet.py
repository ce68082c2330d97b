"""Fleet of virtual devices for a simulation: compute speed and bandwidth in each round.

FedSpine (section 5.1) measures on Jetson kits. Their mode is drawn again every 20 rounds, and their
bandwidth depends on the distance from the router. A TOML file in ``conf/devices`` describes such a
fleet. All draws depend only on the run's seed, the device and the round. Speeds are the makers'
peak rates, of which training reaches only a part. So times can be compared with each other, but not
with measured times.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from espalier.amounts import count
from espalier.errors import InputError
from espalier.seeds import derive_seed
from espalier.settings.table import Table, mistake_lines

ANYWHERE = "any"
"""Place of devices that are distributed evenly over all places, by the run's seed."""
LEAST = 1e-6
MOST = 1e6
"""Minimum and maximum of speeds; beyond them times would not be comparable."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a device in one round."""

    operations_per_second: float
    bits_per_second: float


class DeviceKind(Table):
    """Kind of device: its peak speed and the modes to which it can be switched."""

    teraflops: float = Field(
        ge=LEAST, le=MOST, description="10^12 operations per second in its fastest mode."
    )
    modes: list[float] = Field(
        min_length=1, max_length=64, description="Speed of each mode relative to the fastest one."
    )

    @field_validator("modes")
    @classmethod
    def _are_shares(cls, modes: list[float]) -> list[float]:
        if not all(LEAST <= mode <= 1 for mode in modes):
            raise ValueError(f"modes are shares of the fastest one, from {LEAST:g} to 1")
        return modes


class Place(Table):
    """Place of devices, which determines their bandwidth."""

    megabits: list[float] = Field(
        min_length=2,
        max_length=2,
        description="Minimum and maximum megabits per second, in both directions.",
    )

    @field_validator("megabits")
    @classmethod
    def _ascend(cls, megabits: list[float]) -> list[float]:
        if not LEAST <= megabits[0] <= megabits[1] <= MOST:
            raise ValueError(f"megabits are the least and the most, from {LEAST:g} to {MOST:g}")
        return megabits


class Group(Table):
    """Devices of one kind at one place."""

    kind: str
    count: int = Field(ge=1, le=100_000)
    place: str = Field(ANYWHERE, description="Name of a place, or `any`.")


class Fleet(Table):
    """Devices in order: client i has device i."""

    mode_rounds: int = Field(
        20, ge=1, description="Number of rounds after which every device's mode is drawn again."
    )
    kinds: dict[str, DeviceKind] = Field(min_length=1)
    places: dict[str, Place] = Field(min_length=1)
    devices: list[Group] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        if ANYWHERE in self.places:
            raise ValueError(
                f"places.{ANYWHERE}: devices whose place is {ANYWHERE} rotate through all places;"
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
        """Number of devices."""
        return sum(group.count for group in self.devices)

    def require(self, num_clients: int) -> None:
        """Raise InputError if a run has more clients than the fleet has devices."""
        if num_clients > self.size:
            raise InputError(
                f"num-clients = {num_clients}: the fleet has {count(self.size, 'device')}; lower"
                " it, or add devices to the fleet"
            )

    def drawn(self, seed: int, device: int, server_round: int) -> Conditions:
        """Return the conditions of one device in a round; rounds count from 1.

        The mode is drawn once per ``mode_rounds`` rounds, and the bandwidth uniformly in every
        round. The result does not depend on the draws of other devices.
        """
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
        speed = kind.modes[int(modes.integers(len(kind.modes)))]
        least, most = place.megabits
        return Conditions(kind.teraflops * speed * 1e12, float(links.uniform(least, most)) * 1e6)

    def _places(self, seed: int, members: list[Group]) -> list[str]:
        """Return the place of each device; those at any place are shuffled and assigned in turn."""
        free = [number for number, group in enumerate(members) if group.place == ANYWHERE]
        order = np.random.default_rng(derive_seed(seed, "device-places")).permutation(len(free))
        names = list(self.places)
        found = [group.place for group in members]
        for turn, chosen in enumerate(order.tolist()):
            found[free[chosen]] = names[turn % len(names)]
        return found


def read_fleet(path: Path) -> Fleet:
    """Read a fleet from a TOML file.

    Raises
    ------
    InputError
        The file does not exist or is not TOML, or keys or values are wrong. The message names the
        file and all wrong keys and values.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"fleet: there is no {path}; see conf/devices for examples") from None
    except OSError as error:
        raise InputError(f"fleet: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"fleet: {path} is not TOML: {error}") from None
    except ValueError as error:
        # No file can have this name.
        raise InputError(f"fleet: {str(path)!r} cannot be read: {error}") from None
    try:
        return Fleet.model_validate(document)
    except ValidationError as error:
        lines = mistake_lines(error, ["mode-rounds", "kinds", "places", "devices"])
        # Errors of the whole fleet, such as unknown kinds, have no location and name their key
        # themselves.
        if not (found := error.errors()[0])["loc"]:
            lines = [found["msg"].removeprefix("Value error, ")]
        raise InputError("\n  ".join([f"{path} is not a fleet:", *lines])) from None
