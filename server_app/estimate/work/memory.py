"""Memory of a process as a list of moments, each with its contents; and of Flower's own processes.

Covers: tensors, from their shapes. The memory of libraries is a measured constant (``LIBRARIES``)
that depends on their versions and on the machine.

Does not cover: the page cache with the files that were read, because the system releases it when
memory is short.

They keep chunks of messages and assemble the messages that they pass on, in ways of their own.
There is no formula for that. The numbers here were measured in real runs with Flower 1.39 (``python
-m benchmarks.plan.deployed``), and are interpolated linearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from espalier.hf.machine.computing import KEPT_BYTES
from server_app.estimate.messages.traffic import Traffic
from strategies.base.rounds import REQUESTS_AHEAD

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

    def plus(self, others: Mapping[str, int]) -> "Moment":
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

        In Espalier's processes it includes the freed memory that the C library keeps.
        """
        is_of_flower = self.process in ("SuperLink", "SuperNode")
        return LIBRARIES[self.process] + (0 if is_of_flower else KEPT_BYTES)

    @property
    def largest(self) -> Moment:
        """Moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes, default=Moment("nothing", {}))

    @property
    def peak(self) -> int:
        """Highest resident memory, in bytes."""
        return self.libraries + self.largest.num_bytes


MEGA = 10**6
Points = Sequence[tuple[float, float]]
"""Pairs of megabytes in messages and megabytes of process memory, both increasing."""
IN_SUPERLINK: Points = (
    (0, 0),
    (2, 1),
    (8, 38),
    (28, 85),
    (85, 298),
    (170, 420),
    (240, 659),
    (294, 687),
    (339, 758),
)
"""Memory of a SuperLink, over the largest reply times the number of clients plus largest request.

Measured with messages of 0.8 to 241 MB for two clients. Four clients with replies of 42 MB took 296
MB, less than the line says: they did not answer at the same time.
"""
IN_SUPERNODE: Points = ((0, 0), (1, 6), (4, 18), (14, 45), (42, 150), (120, 340), (268, 500))
"""Memory of a SuperNode, over the size of the largest message.

The last point is the line of the points before it, flattened: a request of 241 MB took 301 MB.
"""
DATABASE = 2_300_000
"""Bytes of a SuperLink's database with a run's bundle, before any message."""


def superlink(traffic: Traffic, clients: int) -> Memory:
    """Return the memory of a SuperLink with a database on disk."""
    num_bytes = _between(IN_SUPERLINK, traffic.largest_reply * clients + traffic.largest_request)
    return Memory("SuperLink", (Moment("passing messages", {"messages": num_bytes}),))


def supernode(largest_message: int) -> Memory:
    """Return the memory of a SuperNode; the ClientApp that it starts is another process."""
    return Memory(
        "SuperNode",
        (Moment("passing a message", {"messages": _between(IN_SUPERNODE, largest_message)}),),
    )


def superlink_disk(largest_message: int, clients: int) -> int:
    """Return the disk space of the database and of messages in transit, in bytes.

    Each client has at most ``REQUESTS_AHEAD`` messages in transit.
    """
    return DATABASE + REQUESTS_AHEAD * largest_message * clients


def _between(points: Points, num_bytes: float) -> int:
    """Return the interpolated memory in bytes for a size of messages.

    Beyond the last point it is extrapolated from the last two.
    """
    size = num_bytes / MEGA
    (x, y), (further, more) = next(
        ((a, b) for a, b in pairwise(points) if size <= b[0]), (points[-2], points[-1])
    )
    return round(MEGA * (y + (size - x) * (more - y) / (further - x)))
