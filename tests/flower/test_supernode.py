"""Waiting times and steps of this project's SuperNodes."""

import inspect
import time
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from espalier.flower.supernode import ASK_SECONDS, BUSY_SECONDS, REPLY_SECONDS, Steps, Waits


def test_only_a_busy_node_asks_often() -> None:
    now = [0.0]
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    waits = Waits(lambda: now[0], sleep)
    waits.sleep(3)
    assert slept == [3]
    # Flower waits this long for a reply.
    waits.sleep(0.5)
    waits.sleep(0.01)
    waits.sleep(3)
    assert slept[1:] == [REPLY_SECONDS, 0.01, ASK_SECONDS]
    now[0] += BUSY_SECONDS
    waits.sleep(3)
    assert slept[4:] == [3]
    assert waits.monotonic is time.monotonic


def test_flower_s_loop_uses_replaced_sleep() -> None:
    assert start_client_internal.time is time
    source = inspect.getsource(start_client_internal)
    assert "time.sleep(3)" in source
    assert "time.sleep(0.5)" in source
    assert source.count("time.sleep(") == 3


def test_left_over_reply_delays_no_other(monkeypatch: Any) -> None:
    """A run ended while its message arrived; the reply to it comes before that to the next one.

    Flower's own functions send here; only the connection and the processing are not real.
    """
    objects = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=objects).state()
    store = objects.store()
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(state, "get_message_processing_duration", lambda message_id: 0.0)
    sent = list[str]()
    slept = list[float]()

    def send(message: Message, *_: Any) -> tuple[set[str], str]:
        sent.append(str(message.content["word"]["text"]))
        return set(), "session"

    def reply(word: str) -> None:
        asked = Message(RecordDict(), dst_node_id=1, message_type="train")
        asked.metadata.__dict__["_message_id"] = f"asked {word}"
        answer = Message(RecordDict({"word": ConfigRecord({"text": word})}), reply_to=asked)
        start_client_internal._insert_message(answer, state, store)

    received = iter([5, None, None, 6])
    steps = Steps(lambda **_: next(received), start_client_internal._push_messages, slept.append)

    def step() -> None:
        assert steps.receive(state=state) is not None
        steps.send(state=state, object_store=store, send=send, push_object=lambda *_: None)

    reply("left over")
    step()
    assert sent == ["left over"]
    reply("second")
    step()
    assert sent == ["left over", "second"]
    assert slept == []
    step()
    assert slept == [3]
    reply("third")
    step()
    assert sent == ["left over", "second", "third"]


def test_flower_s_loop_has_both_steps() -> None:
    source = inspect.getsource(start_client_internal.start_client_internal)
    assert source.count("_pull_and_store_message(\n") == 1
    assert source.count("_push_messages(\n") == 1
    assert source.index("run_id is None") < source.index("_push_messages(\n")
