"""Enrolment: nodes that claim a name, and nodes that return."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody, NoFields
from espalier.messages.records import write
from tests.strategies.base.enrolling_nodes import ENROLMENT, Server


def test_seat_stays_while_its_node_answers(tmp_path: Path) -> None:
    """Another node takes the name of a; then a message of b is lost."""
    server = Server(tmp_path, {1: "a", 2: "b"}, attempts=3)
    server.enrol()
    server.nodes.joining[server.time.seconds] = (3, "a")
    server.nodes.silent = {2}
    assert server.train() == [0]
    server.nodes.silent = set()
    assert server.train() == [0]
    assert 3 not in server.asked_to_train()
    assert server.rounds.roster.seats[0].node_id == 1


def test_lost_seat_goes_to_earliest_node(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"}, quorum=0.5)
    server.enrol()
    server.nodes.silent = {1}
    server.nodes.joining = {server.time.seconds: (3, "a"), server.time.seconds + 1: (4, "a")}
    assert sorted(server.train()) == [0, 1]
    assert server.asked_to_train() == [1, 2, 1, 3]
    assert [line for line in server.shown if "another node" in line] == [
        "reconnected  a: it now answers from another node"
    ]


def test_late_node_keeps_its_seat(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, {1: "a", 2: "b", 3: "a"}, attempts=2)
    server.enrol()
    server.nodes.silent = {1}
    again = [1, 2, 1]
    push = server.nodes.push_messages

    def awake(messages: Iterable[Message]) -> list[str]:
        if server.asked_to_train() == again[:2]:
            server.nodes.silent = set()
        return push(messages)

    server.nodes.push_messages = awake  # type: ignore[method-assign]
    assert sorted(server.train()) == [0, 1]
    assert server.asked_to_train() == again
    assert server.rounds.roster.seats[0].node_id == 1


def test_error_of_connected_node_frees_no_seat(tmp_path: Path) -> None:
    """The error lasts until the last attempt, which costs the client its contribution."""
    server = Server(tmp_path, {1: "a", 2: "b", 3: "a"}, quorum=0.5)
    server.enrol()
    server.nodes.broken = {1}
    assert server.train() == [1]
    assert server.asked_to_train() == [1, 2, 1]
    assert (
        server.rounds.roster.seats[0].reason
        == "train: Flower reports error 5: node unavailable (2 of 2 attempts)"
    )


def test_nodes_of_one_name_that_do_not_answer_end(tmp_path: Path) -> None:
    """Each node is asked in turn, as often in total as the holder of the seat was asked."""
    server = Server(tmp_path, {1: "a", 2: "b"} | dict.fromkeys(range(3, 9), "a"), quorum=0.5)
    server.enrol()
    server.nodes.silent = {1, *range(3, 9)}
    assert server.train() == [1]
    assert server.asked_to_train() == [1, 2, 1, 3, 4]
    assert (
        server.rounds.roster.seats[0].reason
        == "train: no reply before the deadline (4 of 4 attempts)"
    )


def test_node_regains_a_seat_left_unanswered(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, {1: "a", 2: "b", 3: "a"}, attempts=2)
    server.enrol()
    server.nodes.silent = {1, 3}
    wake = server.time.seconds + 13
    answer = server.nodes.get_node_ids

    def awake() -> list[int]:
        if server.time.seconds >= wake:
            server.nodes.silent.discard(1)
        return answer()

    server.nodes.get_node_ids = awake  # type: ignore[method-assign]
    assert sorted(server.train()) == [0, 1]
    assert server.asked_to_train() == [1, 2, 1, 3, 1]


def test_earlier_node_s_message_takes_no_seat(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"}, attempts=2)
    server.enrol()
    seat = server.rounds.roster.seats[0]
    server.nodes.silent = {1}
    server.nodes.joining[server.time.seconds] = (3, "a")
    requests = [server.rounds.request("train", seat.client, 1, NoFields()) for _ in range(2)]
    assert len(list(server.rounds.exchange(requests))) == 2
    assert server.asked_to_train() == [1, 1, 1, 1, 3, 3]
    assert seat.node_id == 3


@pytest.mark.parametrize("listed", [True, False])
def test_site_restarted_at_enrolment_has_its_seat(tmp_path: Path, listed: bool) -> None:
    """The new node connects while the old one is still listed, or after it disappeared."""
    server = Server(tmp_path, {1: "a"})
    server.nodes.silent = {1}
    server.nodes.joining = {4.0: (3, "a"), 8.0: (2, "b")}
    if not listed:
        server.nodes.leaving = {4.0: 1}
    server.enrol()
    assert server.rounds.roster.seats[0].node_id == (1 if listed else 3)
    assert sorted(server.train()) == [0, 1]
    assert server.rounds.roster.seats[0].node_id == 3
    assert server.rounds.roster.refused == {}


def test_a_node_that_is_gone_makes_room(tmp_path: Path) -> None:
    """Flower reports an error for the node at once and no longer lists it."""
    server = Server(tmp_path, {1: "a", 2: "b", 3: "a"})
    server.enrol()
    server.nodes.broken = {1}
    server.nodes.get_node_ids = lambda: [2, 3]  # type: ignore[method-assign]
    assert sorted(server.train()) == [0, 1]
    assert server.asked_to_train() == [1, 2, 3]


def test_who_has_no_seat_gets_none_by_a_name(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"}, quorum=0.5)
    server.enrol()
    server.nodes.joining[server.time.seconds] = (3, "c")
    server.nodes.silent = {1}
    assert server.train() == [1]
    assert 3 not in server.asked_to_train()


@pytest.mark.parametrize("clients", [None, {"a": 0, "b": 1}])
def test_seatless_nodes_prolong_no_wait(tmp_path: Path, clients: dict[str, int] | None) -> None:
    """Such nodes have a name that is taken or another program.

    In a resumed run, a site without a seat is one too.
    """
    server = Server(tmp_path, {1: "a"}, quorum=0.5)
    server.nodes.joining = {10.0 * number: (number + 1, "a") for number in range(1, 20)}
    other = ENROLMENT.model_copy(
        update={"site": "c", "code_sha256": "f" * 64} if clients is None else {"site": "c"}
    )
    server.nodes.joining[15.0] = (99, "c")
    request = server.rounds.request("enrol", -1, 0, NoFields())
    server.nodes.replies["enrol 99"] = write(MessageBody(request.header, other.model_dump()))
    server.enrol(clients)
    assert 30.0 <= server.time.seconds < 31.0
    assert server.rounds.roster.clients() == (clients or {"a": 0})
