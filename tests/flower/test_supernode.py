"""Waiting times and steps of this project's SuperNodes."""

import inspect
import time
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import Status
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.servicer.runtime import runtime_handlers

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

    run_ids = iter([5, None, None, 6])
    steps = Steps(lambda **_: next(run_ids), start_client_internal._push_messages, slept.append)

    def step() -> None:
        received = steps.receive(
            state=state, pull_object=lambda *_: b"", confirm_message_received=lambda *_: None
        )
        assert received is not None
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


def test_ended_run_leaves_no_half_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends while its message arrives; whoever claims the task finds no message."""
    objects = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=objects).state()
    state.set_node_id(1)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 7)
    run = replace(Run.create_empty(7), fab_hash="hash", series_id=7)
    state.store_run(run)
    message = Message(
        RecordDict({"word": ConfigRecord({"text": "x"})}), dst_node_id=1, message_type="train"
    )
    message.metadata.__dict__["_message_id"] = message.object_id
    tree = get_object_tree(message)

    def ended(*_: Any) -> bytes:
        raise RunNotRunningException

    steps = Steps(start_client_internal._pull_and_store_message, lambda **_: None, lambda _: None)
    arguments = {
        "object_store": objects.store(),
        "node_config": {},
        "receive": lambda: (message, tree),
        "get_run": lambda _: run,
        "get_fab": lambda *_: None,
        "trusted_entities": None,
    }
    steps.receive(
        state=state, pull_object=ended, confirm_message_received=lambda *_: None, **arguments
    )
    (task,) = state.get_tasks()
    asked = PullAppMessagesRequest()
    assert not runtime_handlers.pull_messages(asked, state, task).messages_list
    wanted = PullObjectRequest(object_id=tree.object_id)
    assert not runtime_handlers.pull_object(wanted, state, task).object_found
    assert task.status.status == Status.PENDING
