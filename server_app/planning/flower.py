"""Memory and disk of Flower's own processes: a SuperLink and a SuperNode, through which messages pass.

They hold chunks of messages, and put together what they hand out, in ways of their own. So this is no formula: what they held
was measured with real runs (``python -m benchmarks.plan.deployed``; with parts of 256 MiB ``python -m benchmarks.wire``), and
between two such points a straight line is drawn.
"""

from collections.abc import Sequence
from itertools import pairwise

from server_app.planning.exchange import Traffic
from server_app.planning.memory import Memory, Moment
from strategies.engine.rounds import REQUESTS_AHEAD

MEGA = 10**6
Points = Sequence[tuple[float, float]]
"""Megabytes of messages, and megabytes that a process held for them; both grow."""
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
"""By the largest reply times the number of clients and the largest request: 0.8 to 268 MB of two clients, 42 MB of four."""
REQUESTS_COUNT = 0.7
"""What all clients are sent alike is there once, and less of it; a sub-model of 241 MB to two clients was held so (FedSODA)."""
IN_SUPERNODE: Points = ((0, 0), (1, 6), (4, 24), (14, 47), (42, 97), (120, 225), (268, 368))
"""By the largest message."""
DATABASE = 2_300_000
"""Bytes of a SuperLink's database with a run's bundle in it, before messages."""


def superlink(traffic: Traffic, clients: int) -> Memory:
    """Of a SuperLink with a database on disk."""
    held = _between(
        IN_SUPERLINK, traffic.largest_reply * clients + REQUESTS_COUNT * traffic.largest_request
    )
    return Memory("SuperLink", (Moment("passing messages", {"messages": held}),))


def supernode(largest_message: int) -> Memory:
    """Of a SuperNode; the ClientApp that it starts is a process of its own."""
    return Memory(
        "SuperNode",
        (Moment("passing a message", {"messages": _between(IN_SUPERNODE, largest_message)}),),
    )


def superlink_disk(largest_message: int, clients: int) -> int:
    """Bytes of its database, and of messages under way: of each client as many as are asked for ahead."""
    return DATABASE + REQUESTS_AHEAD * largest_message * clients


def _between(points: Points, num_bytes: float) -> int:
    """Bytes that are held for so many of messages; beyond the last point as between the last two."""
    size = num_bytes / MEGA
    (x, y), (further, more) = next(
        ((a, b) for a, b in pairwise(points) if size <= b[0]), (points[-2], points[-1])
    )
    return round(MEGA * (y + (size - x) * (more - y) / (further - x)))
