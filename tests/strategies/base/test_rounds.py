"""Replies in parts, and deadlines.

The next part is requested before the last one is processed, and at most two are in flight. A client
that works, or waits for the worker of another one, is not late. Some messages may take longer.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.blobs.masks import mask_name
from espalier.messages.message import MessageBody, NoFields, failure
from espalier.messages.parts import PartRequest, Report
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import pack_tensors
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, block_key
from espalier.settings.run import parse
from espalier.storage.activity import AtWork
from espalier.storage.blobs import sha256
from strategies.base.inbox import Inbox
from strategies.base.progress import Clock, Progress
from strategies.base.roster import Seat
from strategies.base.rounds import Rounds
from strategies.base.run_folder import RunFolder
from tests.in_process import FakeTime
from tests.run_names import BY_HAND

BLOCKS = 5
NODE = 7
LINEAR = LinearPlan("attn.q", "weight", (96, 64))
MASK = np.full(96, 0x5555555555555555, dtype=np.uint64)
"""Mask of half of each row of 64."""
SHA256 = sha256(pack_tensors({mask_name(LINEAR.name): MASK}))


class OneNode:
    """Grid of one node that answers at once.

    It does not answer for the parts in ``silent`` and returns a failure for those in ``failing``.
    """

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

    def _answer(self, header: Any) -> MessageBody:
        if header.part in self.failing:
            return failure(header, "no such blob")
        report = Report(seconds=0.0, blob_sha256=[SHA256] * BLOCKS)
        fields = report if header.kind == "train" else NoFields()
        blobs = {block_key(header.part): pack_tensors({mask_name(LINEAR.name): MASK})}
        return MessageBody(
            header.model_copy(update={"num_parts": BLOCKS}), fields.model_dump(), blobs
        )

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self._replies.pop(name) for name in message_ids if name in self._replies]
        self.under_way -= set(message_ids) - self._replies.keys() if found else set()
        return found


class CountingReferences(OneNode):
    """Grid that counts references to the blobs of earlier parts before it returns the next."""

    def __init__(self) -> None:
        super().__init__()
        # The first blob is a baseline that nothing else refers to.
        self.given = [bytes(1)]
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
    """Rounds with one client, whose reply has five parts."""
    settings = parse({"num-clients": 1, "part-bytes": 1024, "deadline-seconds": 5.0, "attempts": 2})
    plan = ModelPlan(
        tuple(BlockPlan(index, (LINEAR,)) for index in range(BLOCKS)), BLOCKS * LINEAR.num_weights
    )
    folder = RunFolder(tmp_path)
    clock = FakeTime().clock()
    rounds = Rounds(
        grid, settings, plan, BY_HAND, folder, Progress(folder, clock, show=lambda _: None), clock
    )  # type: ignore[arg-type]
    rounds.roster.seats[0] = Seat(0, "site", NODE)
    return rounds


def exchange(rounds: Rounds) -> Iterable[MessageBody]:
    """Yield all parts of a round's reply."""

    def next_part(body: MessageBody) -> MessageBody | None:
        following = body.header.part + 1
        request = PartRequest(blob_sha256=[SHA256])
        return (
            rounds.request("fetch", 0, 1, request, part=following) if following < BLOCKS else None
        )

    return rounds.exchange([rounds.request("train", 0, 1, NoFields())], next_part)


def test_next_part_is_requested_ahead(rounds: Rounds, grid: OneNode) -> None:
    for number, reply in enumerate(exchange(rounds)):
        assert reply.header.part == number
        assert grid.asked[-1] == ("fetch", min(number + 2, BLOCKS - 1))
    assert grid.asked == [("train", 0), *(("fetch", part) for part in range(1, BLOCKS))]
    assert grid.most == 2


def test_failed_client_is_awaited_no_more(rounds: Rounds, grid: OneNode) -> None:
    grid.failing = {1}
    assert [reply.header.part for reply in exchange(rounds)] == [0]
    assert rounds.roster.seats[0].reason == "fetch: no such blob"
    assert grid.asked == [("train", 0), ("fetch", 1), ("fetch", 2)]


def test_silent_part_is_repeated_before_dropping(rounds: Rounds, grid: OneNode) -> None:
    grid.silent = {3}
    assert [reply.header.part for reply in exchange(rounds)] == [0, 1, 2, 4]
    assert [grid.asked.count(("fetch", part)) for part in range(1, BLOCKS)] == [1, 1, 2, 1]
    assert rounds.roster.seats[0].reason == "fetch: no reply before the deadline (2 of 2 attempts)"


@pytest.mark.parametrize("grid", [CountingReferences], indirect=True)
@pytest.mark.parametrize("stored", [True, False])
def test_earlier_parts_are_released_at_pull(
    rounds: Rounds, grid: CountingReferences, tmp_path: Path, stored: bool
) -> None:
    replies = exchange(rounds)
    for _ in Inbox(tmp_path / "inbox").receive(replies) if stored else replies:
        del _
    assert len(grid.given) == 1 + BLOCKS
    assert len(grid.held) == 1


# ----- deadlines ----------------------------------------------------------------------------------


class Slow(OneNode):
    """Grid that answers after ``tenths`` tenths of a second.

    Before each query it calls ``before_pull`` with the tenths that have passed.
    """

    def __init__(self, clock: Clock, tenths: int) -> None:
        super().__init__()
        self.tenths = tenths
        self.clock = clock
        self.begun = clock.now()
        self.num_pulls = 0
        self.before_pull: Callable[[int], None] = lambda tenth: None
        self.ttls: list[float] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        self.ttls.append(message.metadata.ttl)
        return super().push_messages([message])

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.num_pulls += 1
        self.before_pull(self.now())
        return super().pull_messages(message_ids) if self.now() >= self.tenths else []

    def now(self) -> int:
        """Return the tenths of a second since the start."""
        return round(10 * (self.clock.now() - self.begun))


def ask(rounds: Rounds, **more: Any) -> list[MessageBody]:
    """Request only the first part."""
    rounds.roster.seats[0].status = "completed"
    return list(rounds.exchange([rounds.request("train", 0, 1, NoFields())], **more))


def slowly(rounds: Rounds, tenths: int) -> Slow:
    """Give the rounds a slow grid, which answers after ``tenths`` tenths of a second."""
    rounds.grid = grid = Slow(rounds.clock, tenths)  # type: ignore[assignment]
    return grid


@pytest.fixture
def shown(rounds: Rounds) -> list[str]:
    """Progress lines that the user sees."""
    lines: list[str] = []
    rounds.progress = Progress(rounds.folder, rounds.clock, show=lines.append)
    return lines


def test_idle_message_is_repeated_before_dropping(
    rounds: Rounds,
) -> None:
    grid = slowly(rounds, 10_000)
    assert ask(rounds) == []
    assert len(grid.asked) == 2
    assert rounds.roster.seats[0].reason == "train: no reply before the deadline (2 of 2 attempts)"


def test_simulated_client_at_work_is_not_late(rounds: Rounds, tmp_path: Path) -> None:
    """The work takes an hour; the deadline is five seconds."""
    grid = slowly(rounds, 36_000)
    rounds.shared_workers = True
    rounds.work = AtWork(tmp_path, BY_HAND)
    with rounds.work.working():
        assert len(ask(rounds)) == 1
    assert grid.asked == [("train", 0)]
    assert grid.ttls[0] > 3600


def test_deadline_counts_once_nobody_works(rounds: Rounds, tmp_path: Path) -> None:
    """The work ends after a minute, and its reply is lost."""
    grid = slowly(rounds, 10_000)
    work = AtWork(tmp_path, BY_HAND)
    rounds.shared_workers = True
    rounds.work = work
    sent_again: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(work.working())

        def note(tenth: int) -> None:
            if tenth >= 600:
                stack.close()
            if len(grid.asked) > 1:
                sent_again.append(tenth)

        grid.before_pull = note
        assert ask(rounds) == []
    assert 645 <= sent_again[0] <= 655
    assert rounds.roster.seats[0].reason.endswith("(2 of 2 attempts)")


def test_local_work_says_nothing_of_remote_site(rounds: Rounds, tmp_path: Path) -> None:
    slowly(rounds, 10_000)
    rounds.work = AtWork(tmp_path, BY_HAND)
    with rounds.work.working():
        assert ask(rounds) == []


def test_a_message_may_take_longer_than_others(rounds: Rounds) -> None:
    grid = slowly(rounds, 590)
    assert len(ask(rounds, patience=lambda seat: 60.0)) == 1
    assert grid.asked == [("train", 0)]
    assert grid.ttls[0] > 60.0
    grid = slowly(rounds, 10_000)
    assert ask(rounds, patience=lambda seat: 60.0) == []
    assert len(grid.asked) == 2
    # The second attempt may take as long as the first.
    assert 1200 <= grid.now() <= 1210


def test_superlink_is_asked_seldom_when_silent(rounds: Rounds) -> None:
    """The server asks ten times a second for five seconds, then twice a second."""
    grid = slowly(rounds, 350)
    assert len(ask(rounds, patience=lambda seat: 60.0)) == 1
    assert 110 <= grid.num_pulls <= 113


def test_message_has_at_least_the_set_time(rounds: Rounds) -> None:
    grid = slowly(rounds, 40)
    assert len(ask(rounds, patience=lambda seat: 0.5)) == 1
    assert grid.asked == [("train", 0)]


# ----- progress lines -----------------------------------------------------------------------------


def test_local_clients_progress_is_shown(rounds: Rounds, tmp_path: Path, shown: list[str]) -> None:
    grid = slowly(rounds, 50)
    work = AtWork(tmp_path, BY_HAND)
    rounds.shared_workers = True
    rounds.work = work
    grid.before_pull = lambda tenth: (
        work.say("node-00000 train: pruning block 2 of 5  [31 s]") if tenth == 30 else None
    )
    with work.working():
        ask(rounds)
    assert shown == ["node-00000 train: pruning block 2 of 5  [31 s]"]
    assert '"at_work"' in rounds.folder.metrics.path.read_text()


def test_sites_awaiting_approval_are_told_first(rounds: Rounds, shown: list[str]) -> None:
    rounds.progress.begin("masks", 1)
    rounds.roster.seats[0].approval = True
    slowly(rounds, 1900)
    ask(rounds, patience=lambda seat: 1000.0)
    assert shown[0] == "masks        ░░░░░░░░░░░░░░░░░░░░░░░░ 0/1"
    assert [line.split("  [")[0] for line in shown[1:]] == [
        f"masks        waiting for site (asked {time} ago; a person there must approve its replies)"
        for time in ("60 s", "2 min", "3 min")
    ]


def test_who_is_waited_for_is_told_once_a_minute(rounds: Rounds, shown: list[str]) -> None:
    rounds.progress.begin("masks", 1)
    slowly(rounds, 1900)
    ask(rounds, patience=lambda seat: 1000.0)
    assert shown[1:] == [
        f"masks        waiting for site  [{time}]" for time in ("60 s", "2 min", "3 min")
    ]


def test_progress_texts_are_put_off_by_other_lines(rounds: Rounds, shown: list[str]) -> None:
    rounds.progress.begin("evaluating", 2)
    for second in range(30):
        rounds.clock.sleep(1.0)
        rounds.progress.report(f"passing block {second + 1} of 30")
        if second == 15:
            rounds.progress.step("evaluated", "dense")
    assert [line.split("[")[0].rstrip() for line in shown if "block" in line] == [
        "evaluating   passing block 10 of 30",
        "evaluating   passing block 26 of 30",
    ]


def test_seconds_of_several_rounds_are_summed() -> None:
    seat = Seat(0, "site", 1)
    seat.worked(2.0)
    assert seat.work() == "2.0 s of work"
    seat.worked(3.5)
    assert seat.work() == "3.5 s of work, 5.5 s in 2 rounds"
