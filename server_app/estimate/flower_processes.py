"""Memory and disk space of Flower's own processes: a SuperLink and a SuperNode.

They keep chunks of messages and assemble the messages that they pass on, in ways of their own.
There is no formula for that. The numbers here were measured in real runs (``python -m
benchmarks.plan.deployed``; with parts of 256 MiB ``python -m benchmarks.wire``), and are
interpolated linearly.
"""

from collections.abc import Sequence
from itertools import pairwise

from server_app.estimate.exchange import Traffic
from server_app.estimate.memory import Memory, Moment
from strategies.base.rounds import REQUESTS_AHEAD

MEGA = 10**6
Points = Sequence[tuple[float, float]]
"""Pairs of megabytes in messages and megabytes of process memory, both increasing."""
IN_SUPERLINK: Points = (
    (0, 0),
    (2, 2),
    (8, 39),
    (28, 82),
    (85, 253),
    (170, 362),
    (240, 534),
    (536, 619),
)
"""Memory of a SuperLink, over the largest reply times the number of clients plus requests.

Measured with messages of 0.8 to 268 MB for two clients, and of 42 MB for four. Requests count with
the largest one times ``REQUESTS_COUNT``.
"""
REQUESTS_COUNT = 0.7
"""Factor for the size of the largest request.

A request that is the same for all clients is in memory only once, and not completely. Measured with
a sub-model of 241 MB that was sent to two clients (FedSODA).
"""
IN_SUPERNODE: Points = ((0, 0), (1, 6), (4, 24), (14, 47), (42, 97), (120, 225), (268, 368))
"""Memory of a SuperNode, over the size of the largest message."""
DATABASE = 2_300_000
"""Bytes of a SuperLink's database with a run's bundle, before any message."""


def superlink(traffic: Traffic, clients: int) -> Memory:
    """Return the memory of a SuperLink with a database on disk."""
    held = _between(
        IN_SUPERLINK, traffic.largest_reply * clients + REQUESTS_COUNT * traffic.largest_request
    )
    return Memory("SuperLink", (Moment("passing messages", {"messages": held}),))


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
