"""Memory and disk of Flower's own processes: a SuperLink and a SuperNode, through which messages pass.

They hold chunks of messages, and put together what they hand out. How many times a message is in memory was measured once, with
messages of 256 MiB of two clients (``python -m benchmarks.wire``, docs/performance.md): that is no formula of ours.
"""

from server_app.planning.memory import Memory, Moment
from strategies.engine.rounds import REQUESTS_AHEAD

IN_SUPERLINK, IN_SUPERNODE = 2.3, 1.4
"""Times that the largest message is in memory."""


def superlink(largest_message: int) -> Memory:
    """Of a SuperLink with a database on disk."""
    return Memory("SuperLink", (Moment("passing a message", {"messages": round(IN_SUPERLINK * largest_message)}),))


def supernode(largest_message: int) -> Memory:
    """Of a SuperNode; the ClientApp that it starts is a process of its own."""
    return Memory("SuperNode", (Moment("passing a message", {"messages": round(IN_SUPERNODE * largest_message)}),))


def superlink_disk(largest_message: int, clients: int) -> int:
    """Bytes of messages under way: of each client as many as are asked for ahead."""
    return REQUESTS_AHEAD * largest_message * clients
