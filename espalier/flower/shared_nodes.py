"""Grids of a simulation: their detection, and nodes that each act as several clients.

Plain ``flwr run`` simulates two nodes by default, independent of the app's settings. The ServerApp
sees as many nodes as there are clients. Each message contains a record with the client for which
the node acts, and the simulated node removes that record (``client_app.simulation``). A real node
does not know the record and refuses the message.

In a simulation all clients are on this machine. So the site policy does not apply, half of the
clients are a quorum, and a centralized baseline is possible.
Covers: a grid counts as a simulation only if its class is listed here. Every other grid, including
a class that a later version of Flower adds, counts as a deployment.
Does not cover: what a client may do. A client detects by itself whether it is simulated
(``client_app.simulation``) and never asks the server.
"""

from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import InMemoryGrid

PLAYED = "played"
"""Name of the record, whose keys are those of a simulated node's configuration."""


def with_enough_nodes(grid: Grid, clients: int) -> Grid:
    """Return the grid, or a ``SharedNodes`` grid if it has fewer nodes than ``clients``."""
    # Only simulations can share nodes: a real node answers for one site.
    if not isinstance(grid, InMemoryGrid) or len(list(grid.get_node_ids())) >= clients:
        return grid
    return SharedNodes(grid, clients)


class SharedNodes(Grid):
    """Grid of a simulation in which node ``number``, from 1 on, is client ``number - 1``."""

    def __init__(self, grid: Grid, clients: int) -> None:
        self._grid = grid
        self._clients = clients
        self._nodes = sorted(grid.get_node_ids())

    def get_node_ids(self) -> list[int]:
        """Return one id per client."""
        return list(range(1, self._clients + 1))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to the nodes that act as their clients."""
        return self._grid.push_messages(map(self._addressed, messages))

    def _addressed(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        # Clients are spread evenly over the nodes.
        message.metadata.dst_node_id = self._nodes[client % len(self._nodes)]
        # The record names the client for which the node acts.
        message.content[PLAYED] = ConfigRecord(
            {"partition-id": client, "num-partitions": self._clients}
        )
        return message

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._grid.send_and_receive(map(self._addressed, messages), timeout=timeout)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._grid.create_message(*args, **kwargs)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run


def taken_out(content: RecordDict) -> dict[str, Any]:
    """Remove the record from a message's content and return its values; empty without a record."""
    record = content.pop(PLAYED, None)
    return dict(record) if isinstance(record, ConfigRecord) else {}


GRIDS: tuple[type[Grid], ...] = (InMemoryGrid,)
"""Grid classes of simulations.

Tests and benchmarks that run all nodes in one process add their own.
"""


def is_simulation(grid: Grid) -> bool:
    """Return whether the nodes of this grid are simulated on this machine."""
    return isinstance(grid, GRIDS)


def play_task() -> None:
    """Let this process create messages as if it were a task of run 1, unless it is a task already.

    A ``Message`` records the run of the task that creates it, and raises RuntimeError without a
    task. Tests and benchmarks that run all nodes need this.
    """
    try:
        # The access raises if no run is set.
        TaskIdentity.run_id  # noqa: B018
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = 1
        TaskIdentity.node_id = 0
