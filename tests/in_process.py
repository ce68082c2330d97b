"""A grid without Ray or gRPC: messages go through Flower's serialisation and the real ClientApp, in this process."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid

from strategies.clock import Clock

Tamper = Callable[[Message, Message], Message | None]
"""(request, reply) -> the reply that arrives; None: none ever does."""


class FakeTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class InProcessGrid(Grid):
    """Answers each pushed message at once; ``tamper`` may change or swallow a reply by partition id."""

    def __init__(self, app: ClientApp, node_configs: list[dict[str, Any]], run_config: dict[str, Any]) -> None:
        self.app = app
        self.contexts = {
            1000 - 7 * index: Context(
                run_id=1, node_id=1000 - 7 * index, state=RecordDict(), run_config=dict(run_config), node_config=dict(config)
            )
            for index, config in enumerate(node_configs)
        }
        self.tamper: dict[int, Tamper] = {}
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.order: Callable[[list[str]], list[str]] = list
        self._counter = 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._counter += 1
            message_id = message.metadata.__dict__["_message_id"] = f"message-{self._counter}"
            ids.append(message_id)
            self.sent.append(message)
            context = self.contexts.get(message.metadata.dst_node_id)
            if context is None:
                continue
            try:
                reply: Message | None = self.app(message, context)
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            tamper = self.tamper.get(int(context.node_config.get("partition-id", -1)))
            if tamper is not None and reply is not None:
                reply = tamper(message, reply)
            if reply is not None:
                self.received.append(reply)
                self.replies[message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(message_id) for message_id in list(message_ids) if message_id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
