"""Grid without Ray or gRPC: messages go to the real ClientApp in this process."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

import espalier.flower.shared_nodes
from client_app.simulation import playing_a_node
from espalier.flower.shared_nodes import play_task
from strategies.base.progress import Clock

Tamper = Callable[[Message, Message], Message | None]
"""Function (request, reply) -> reply that arrives; None if no reply arrives."""


class FakeTime:
    """Clock that advances only when code sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clock(self) -> Clock:
        """Return the clock for the code under test."""
        return Clock(now=lambda: self.seconds, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.seconds += seconds


class InProcessGrid(Grid):
    """Grid that answers each pushed message at once.

    With ``simulated`` it answers as a simulated node. ``tamper`` changes or drops the replies of a
    partition. ``held`` returns a partition's replies only at the n-th pull, so that others overtake
    them. ``before_push`` sees every message first and may raise an error.
    """

    def __init__(
        self, app: ClientApp, node_configs: list[dict[str, Any]], run_config: dict[str, Any]
    ) -> None:
        self.app = app
        self.contexts: dict[int, Context] = {}
        for config in node_configs:
            self.connect(config, run_config)
        self.tamper: dict[int, Tamper] = {}
        self.held: dict[int, int] = {}
        self.simulated = True
        self.before_push: Callable[[Message], None] = lambda _: None
        self.received: list[tuple[int, Message]] = []
        self._replies: dict[str, tuple[int, Message]] = {}
        self._counter = 0

    def connect(self, node_config: dict[str, Any], run_config: dict[str, Any]) -> int:
        """Add a node and return its ID.

        Later nodes have lower IDs, so the order of IDs differs from that of partitions.
        """
        node_id = 1000 - 7 * len(self.contexts)
        state = RecordDict()
        self.contexts[node_id] = Context(1, node_id, dict(node_config), state, dict(run_config))
        return node_id

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.before_push(message)
        self._counter += 1
        message_id = message.metadata.__dict__["_message_id"] = f"message-{self._counter}"
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            # No reply ever arrives from an unknown node, as with a node that is gone.
            return message_id
        try:
            reply: Message | None = self.answer(message, context)
        except Exception as error:
            # Flower reports an exception of a ClientApp in the same way.
            reply = Message(Error(2, str(error)), reply_to=message)
        partition = int(context.node_config.get("partition-id", -1))
        if partition in self.tamper and reply is not None:
            reply = self.tamper[partition](message, reply)
        if reply is not None:
            self.received.append((partition, reply))
            self._replies[message_id] = (self.held.get(partition, 0), reply)
        return message_id

    def answer(self, message: Message, context: Context) -> Message:
        """Return a node's reply."""
        with playing_a_node() if self.simulated else nullcontext():
            return self.app(message, context)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = []
        for message_id in message_ids:
            if message_id not in self._replies:
                continue
            wait, reply = self._replies[message_id]
            if wait > 0:
                self._replies[message_id] = (wait - 1, reply)
            else:
                del self._replies[message_id]
                pulled.append(reply)
        return pulled


# Outside a Flower task no message can be made, so this process plays one.
play_task()
# The server must treat this grid as that of a simulation.
espalier.flower.shared_nodes.GRIDS += (InProcessGrid,)
