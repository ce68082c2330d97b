"""Memory of a process as moments, each of which is what it holds then, part by part; its peak is that of the largest moment.

Covers: tensors, from shapes. What libraries take is a measured constant (``LIBRARIES``), which differs with their versions and
with the machine. Does not cover: the page cache, in which the system keeps files that were read; it gives way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Process = Literal[
    "client",
    "pruning client",
    "tuning client",
    "nf4 client",
    "server",
    "pruning server",
    "tuning server",
    "SuperLink",
    "SuperNode",
]
"""Pruning processes have compiled kernels, tuning ones peft."""

LIBRARIES: Mapping[Process, int] = {
    "client": 485_000_000,
    "pruning client": 550_000_000,
    "tuning client": 500_000_000,
    "nf4 client": 510_000_000,
    "server": 485_000_000,
    "pruning server": 550_000_000,
    "tuning server": 505_000_000,
    "SuperLink": 155_000_000,
    "SuperNode": 130_000_000,
}
"""Resident memory of each process before it holds anything of a run, bytes: as ``python -m benchmarks.plan.libraries`` measured
it with torch for CPUs on Linux."""


@dataclass(frozen=True)
class Moment:
    """What a process holds at one time."""

    name: str
    parts: Mapping[str, int]
    """Bytes by what they are of."""

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())

    def beside(self, others: Mapping[str, int]) -> "Moment":
        """The same, and more."""
        return Moment(self.name, {**others, **self.parts})


@dataclass(frozen=True)
class Memory:
    """A process of a run."""

    process: Process
    moments: tuple[Moment, ...]

    @property
    def libraries(self) -> int:
        """Without anything of the run."""
        return LIBRARIES[self.process]

    @property
    def largest(self) -> Moment:
        """The moment that holds most."""
        return max(self.moments, key=lambda moment: moment.num_bytes, default=Moment("nothing", {}))

    @property
    def peak(self) -> int:
        """Highest resident memory, bytes."""
        return self.libraries + self.largest.num_bytes


def all_beside(moments: Iterable[Moment], others: Mapping[str, int]) -> list[Moment]:
    """Moments in a process that holds something throughout."""
    return [moment.beside(others) for moment in moments]
