"""Memory of a process as a list of moments, each with its contents; the largest is the peak.

Covers: tensors, from their shapes. The memory of libraries is a measured constant (``LIBRARIES``)
that depends on their versions and on the machine.

Does not cover: the page cache with the files that were read, because the system releases it when
memory is short.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from espalier.hf.machine.computing import KEPT_BYTES

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
"""Type of process; pruning processes load compiled kernels, tuning processes peft."""

LIBRARIES: Mapping[Process, int] = {
    "client": 485_000_000,
    "pruning client": 550_000_000,
    "tuning client": 500_000_000,
    "nf4 client": 510_000_000,
    "server": 485_000_000,
    "pruning server": 550_000_000,
    "tuning server": 505_000_000,
    "SuperLink": 190_000_000,
    "SuperNode": 165_000_000,
}
"""Resident memory in bytes of each process before it holds data of a run.

Measured by ``python -m benchmarks.plan.libraries`` with torch for CPUs on Linux.
"""


COMPUTING: Collection[Process] = LIBRARIES.keys() - {"SuperLink", "SuperNode"}
"""Processes of Espalier, in which the C library keeps freed memory."""


@dataclass(frozen=True)
class Moment:
    """Contents of a process's memory at one time."""

    name: str
    parts: Mapping[str, int]
    """Bytes by kind of content."""

    @property
    def num_bytes(self) -> int:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())

    def beside(self, others: Mapping[str, int]) -> "Moment":
        """Return a copy with further parts."""
        return Moment(self.name, {**others, **self.parts})


@dataclass(frozen=True)
class Memory:
    """Memory of one process of a run."""

    process: Process
    moments: tuple[Moment, ...]

    @property
    def libraries(self) -> int:
        """Resident memory without data of the run, in bytes.

        It includes the freed memory that the C library keeps.
        """
        kept = KEPT_BYTES if self.process in COMPUTING else 0
        return LIBRARIES[self.process] + kept

    @property
    def largest(self) -> Moment:
        """Moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes, default=Moment("nothing", {}))

    @property
    def peak(self) -> int:
        """Highest resident memory, in bytes."""
        return self.libraries + self.largest.num_bytes


def all_beside(moments: Iterable[Moment], others: Mapping[str, int]) -> list[Moment]:
    """Return the moments of a process that holds other parts the whole time."""
    return [moment.beside(others) for moment in moments]
