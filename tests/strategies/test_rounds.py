"""Replies in parts: the next part is asked for before the last is dealt with, and never more than two are under way."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from in_process import FakeTime

from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from espalier.wire.fedprllm import VoteReport
from espalier.wire.masks import mask_name
from espalier.wire.messages import Letter, NoScalars, failure, read, write
from espalier.wire.parts import PartRequest
from espalier.wire.payload import block_key, pack_tensors
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan
from strategies.inbox import Inbox
from strategies.progress import Progress
from strategies.roster import Seat
from strategies.rounds import Rounds
from strategies.run_folder import RunFolder

BLOCKS, NODE = 5, 7
LINEAR = LinearPlan("attn.q", "weight", (96, 64))
MASK = np.full(96, 0x5555555555555555, dtype=np.uint64)
"""Half of each row of 64."""
SHA256 = sha256(pack_tensors({mask_name(LINEAR.name): MASK}))


class OneNode:
    """A grid of one node that answers at once; of parts in ``silent`` it says nothing, and it fails at those in ``failing``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.under_way: set[str] = set()
        self.most = 0
        self.silent: set[int] = set()
        self.failing: set[int] = set()
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return [NODE]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        header = read(message.content).header
        name = f"message-{len(self.asked)}"
        message.metadata.__dict__["_message_id"] = name
        self.asked.append((header.kind, header.part))
        self.under_way.add(name)
        self.most = max(self.most, len(self.under_way))
        if header.part not in self.silent:
            self._replies[name] = Message(write(self._answer(header)), reply_to=message)
        return [name]

    def _answer(self, header: Any) -> Letter:
        if header.part in self.failing:
            return failure(header, "no such blob")
        report = VoteReport(seconds=0.0, calibration_tokens=1, calibration_sha256=SHA256, blob_sha256=[SHA256] * BLOCKS)
        scalars = report if header.kind == "train" else NoScalars()
        blobs = {block_key(header.part): pack_tensors({mask_name(LINEAR.name): MASK})}
        return Letter(header.model_copy(update={"num_parts": BLOCKS}), scalars.model_dump(), blobs)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(name) for name in message_ids if name in self._replies]
        self.under_way -= set(message_ids) - self._replies.keys() if found else set()
        return found


class CountingReferences(OneNode):
    """Before it hands out a part, it looks who else holds the blobs of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.given = [bytes(1)]  # the first is nobody's
        self.held: set[int] = set()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.held |= {sys.getrefcount(blob) for blob in self.given}
        found = super().pull_messages(message_ids)
        for message in found:
            self.given += read(message.content).blobs.values()
        return found


@pytest.fixture
def grid(request: pytest.FixtureRequest) -> OneNode:
    return getattr(request, "param", OneNode)()


@pytest.fixture
def rounds(grid: OneNode, tmp_path: Path) -> Rounds:
    """One client, whose reply has five parts."""
    settings = parse({"num-clients": 1, "part-bytes": 1024, "deadline-seconds": 5.0, "attempts": 2})
    plan = ModelPlan(tuple(BlockPlan(index, (LINEAR,)) for index in range(BLOCKS)), BLOCKS * LINEAR.num_weights)
    folder, clock = RunFolder(tmp_path), FakeTime().clock()
    rounds = Rounds(grid, settings, plan, "lineage", folder, Progress(folder, clock, show=lambda _: None), clock)  # type: ignore[arg-type]
    rounds.roster.seats[0] = Seat(0, "site", NODE)
    return rounds


def exchange(rounds: Rounds) -> Iterable[Message]:
    """All parts of a round's reply."""

    def next_part(letter: Letter) -> Message | None:
        following = letter.header.part + 1
        request = PartRequest(blob_sha256=[SHA256])
        return rounds.request("fetch", rounds.roster.seats[0], 1, request, part=following) if following < BLOCKS else None

    return rounds.exchange([rounds.request("train", rounds.roster.seats[0], 1, NoScalars())], next_part)


def test_the_next_part_is_asked_for_before_the_last_is_dealt_with(rounds: Rounds, grid: OneNode) -> None:
    for number, reply in enumerate(exchange(rounds)):
        assert read(reply.content).header.part == number
        assert grid.asked[-1] == ("fetch", min(number + 2, BLOCKS - 1))
    assert grid.asked == [("train", 0), *(("fetch", part) for part in range(1, BLOCKS))]
    assert grid.most == 2


def test_nothing_more_is_awaited_of_a_client_that_failed(rounds: Rounds, grid: OneNode) -> None:
    grid.failing = {1}
    assert [read(reply.content).header.part for reply in exchange(rounds)] == [0]
    assert rounds.roster.seats[0].reason == "fetch: no such blob"
    assert grid.asked == [("train", 0), ("fetch", 1), ("fetch", 2)]


def test_a_silent_part_is_asked_for_again_and_then_costs_its_client(rounds: Rounds, grid: OneNode) -> None:
    grid.silent = {3}
    assert [read(reply.content).header.part for reply in exchange(rounds)] == [0, 1, 2, 4]
    assert [grid.asked.count(("fetch", part)) for part in range(1, BLOCKS)] == [1, 1, 2, 1]
    assert rounds.roster.seats[0].reason == "fetch: no reply before the deadline (2 of 2 attempts)"


@pytest.mark.parametrize("grid", [CountingReferences], indirect=True)
@pytest.mark.parametrize("stored", [True, False])
def test_when_a_part_is_pulled_nothing_is_held_of_those_before(
    rounds: Rounds, grid: CountingReferences, tmp_path: Path, stored: bool
) -> None:
    replies = exchange(rounds)
    for _ in Inbox(tmp_path / "inbox").receive(replies) if stored else replies:
        del _
    assert len(grid.given) == 1 + BLOCKS
    assert len(grid.held) == 1
