"""Run whose clients have processes of their own, so that their memory and time are separate.

Messages go through pipes instead of gRPC; the handlers on both sides are those of every run. A
client's process answers all messages of one client, like a warm node.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from tests.in_process import InProcessGrid


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Reset the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def _client(pipe: Connection) -> None:
    """Answer messages in a client's process, and finally report time and peak memory."""
    from client_app.app import app
    from client_app.simulation import playing_a_node
    from espalier.flower.shared_nodes import play_task
    from espalier.messages.records import address, read

    play_task()
    busy: dict[str, float] = {}
    peaks: dict[str, int] = {}
    while (asked := pipe.recv()) is not None:
        body, context = asked
        started = time.process_time()
        kind = body.header.kind
        forget_peak()
        with playing_a_node():
            reply = app(address(body, 1, 3600.0), Context(*context))
        busy[kind] = busy.get(kind, 0.0) + time.process_time() - started
        peaks[kind] = max(peaks.get(kind, 0), peak())
        pipe.send(read(reply.content))
        del body, asked, reply
    pipe.send({"peaks": peaks, "seconds": busy})


class _Forgetful(list[tuple[int, Message]]):
    """List that stores no replies: a list of them would count as the server's memory."""

    def append(self, _: tuple[int, Message]) -> None:
        """Discard the reply."""


class SeparateGrid(InProcessGrid):
    """Grid whose nodes are processes."""

    def __init__(self, node_configs: list[dict[str, Any]], run_config: dict[str, Any]) -> None:
        # The app runs in the other processes.
        super().__init__(None, node_configs, run_config)
        self.received = _Forgetful()
        self._pipes: dict[int, Connection] = {}
        self._started = get_context("spawn")
        self.figures: list[dict[str, Any]] = []

    def answer(self, message: Message, context: Context) -> Message:
        """Return the reply of a node's process."""
        from espalier.messages.records import read, write

        node = message.metadata.dst_node_id
        if node not in self._pipes:
            here, there = self._started.Pipe()
            self._started.Process(target=_client, args=(there,), daemon=True).start()
            self._pipes[node] = here
        config = (1, node, dict(context.node_config), RecordDict(), dict(context.run_config))
        self._pipes[node].send((read(message.content), config))
        return Message(write(self._pipes[node].recv()), reply_to=message)

    def end(self) -> None:
        """End the processes, and collect their figures in ``figures`` in client order."""
        for _, pipe in sorted(self._pipes.items(), reverse=True):
            pipe.send(None)
            self.figures.append(pipe.recv())


@contextmanager
def state_in(folder: Path) -> Iterator[None]:
    """Set the folder of the clients' state."""
    os.environ["ESPALIER_STATE_DIR"] = str(folder)
    yield
