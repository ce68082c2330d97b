"""Memory and disk space of Flower's own processes: a SuperLink and a SuperNode.

They keep chunks of messages and assemble the messages that they pass on, in ways of their own.
There is no formula for that. The numbers here were measured in real runs with Flower 1.39 (``python
-m benchmarks.plan.deployed``), and are interpolated linearly.
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
    held = _between(IN_SUPERLINK, traffic.largest_reply * clients + traffic.largest_request)
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
