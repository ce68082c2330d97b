"""Lines that are shown while clients enrol, and text from clients in them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord

from espalier.messages.enrolment import refusal
from espalier.messages.message import MessageBody, NoFields, failure
from espalier.messages.records import STYPE, write
from strategies.base.rounds import RunFailed
from tests.strategies.base.enrolling_nodes import ENROLMENT, Server

# ----- progress lines -----------------------------------------------------------------------------


def test_first_answer_of_a_connected_node_may_take_a_deadline(tmp_path: Path) -> None:
    """A node that starts on a busy machine answers long after ``enrol-seconds``."""
    server = Server(tmp_path, {1: "a", 2: "b"}, deadline_seconds=200.0)
    server.nodes.enrol_seconds[2] = 190.0
    server.enrol()
    assert [seat.site for seat in server.rounds.roster.active()] == ["a", "b"]
    assert server.time.seconds < 200.0


def test_node_that_left_is_not_waited_for(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"}, quorum=0.5, deadline_seconds=200.0)
    server.nodes.enrol_seconds[2] = 190.0
    server.nodes.leaving[10.0] = 2
    server.enrol()
    assert [seat.site for seat in server.rounds.roster.active()] == ["a"]
    assert 30.0 <= server.time.seconds < 32.0


def test_node_that_restarts_for_ever_is_not_waited_for(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a"}, quorum=0.5, deadline_seconds=200.0)
    for number in range(100):
        server.nodes.joining[20.0 * number] = (10 + number, "b")
        server.nodes.leaving[20.0 * number + 19.0] = 10 + number
        server.nodes.enrol_seconds[10 + number] = math.inf
    server.enrol()
    assert [seat.site for seat in server.rounds.roster.active()] == ["a"]
    assert server.time.seconds < 240.0


def test_silent_node_ends_after_a_deadline(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"}, quorum=0.5, deadline_seconds=200.0)
    server.nodes.enrol_seconds[2] = math.inf
    server.enrol()
    (line,) = [line for line in server.shown if line.startswith("refused")]
    assert line.endswith(
        "node 2: connected, but did not answer within 3 min 20 s; read the log of the node"
    )


def test_waiting_shows_connected_sites(tmp_path: Path) -> None:
    """A line is shown at once, every ten seconds, and when another site connects."""
    server = Server(tmp_path, {1: "a"})
    server.nodes.joining = {25.0: (2, "b")}
    server.enrol()
    lines = [line for line in server.shown if "sites connected" in line]
    assert lines == [
        "enrolling    1 of 2 sites connected, waiting up to 30 s for more",
        "enrolling    1 of 2 sites connected, waiting up to 20 s for more",
        "enrolling    1 of 2 sites connected, waiting up to 10 s for more",
        "enrolling    2 of 2 sites connected",
    ]


# ----- text from clients --------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x1b[1;1Hall is well\r\n\u202e" + "x" * 3000


def assert_harmless(line: str) -> None:
    assert line.isprintable()
    assert len(line) < 1000


def test_reason_is_one_short_line(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"})
    server.enrol()
    request = server.rounds.request("train", 0, 1, NoFields())
    told = failure(request.header, "no data:\n  row 1\n  row 2" + "\n" * 500 + "x" * 3000)
    server.nodes.replies["train 1"] = write(told)
    assert server.train() == [1]
    seat = server.rounds.roster.seats[0]
    assert seat.reason.startswith("train: no data: row 1; row 2; xxx")
    with pytest.raises(RunFailed) as caught:
        server.rounds.require_quorum(0, "are left")
    events = [
        json.loads(line) for line in (server.folder.path / "metrics.jsonl").read_text().splitlines()
    ]
    texts = [str(value) for event in events for value in event.values()]
    for line in [*server.shown, *texts, seat.reason, *str(caught.value).splitlines()]:
        assert_harmless(line)


@pytest.mark.parametrize(
    "fields",
    [
        {ESCAPES: 1},
        {f"{ESCAPES}{number}": 1 for number in range(30)},
        {f"field-{number}-{ESCAPES[:40]}": 1 for number in range(30)},
        {"reason": ESCAPES},
        ENROLMENT.model_dump() | {"site": ESCAPES[:60]},
        ENROLMENT.model_dump() | {"python": ESCAPES[:20]},
    ],
    ids=range(6),
)
def test_refused_node_cannot_write_to_terminal(tmp_path: Path, fields: dict[str, Any]) -> None:
    server = Server(tmp_path, {1: "a", 2: "b", 3: "c"})
    request = server.rounds.request("enrol", -1, 0, NoFields())
    status = {"status": "failed"} if "reason" in fields else {}
    content = write(MessageBody(request.header.model_copy(update=status)))
    content["fields"] = ConfigRecord(fields)
    server.nodes.replies["enrol 3"] = content
    server.enrol()
    (reason,) = server.rounds.roster.refused.values()
    for line in [*server.shown, reason]:
        assert_harmless(line)
    assert sorted(server.rounds.roster.clients()) == ["a", "b"]


def test_second_node_of_name_is_told_once(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "a", 3: "a", 4: "a"}, quorum=0.5)
    server.enrol()
    told = [line for line in server.shown if "a second node named a; give" in line]
    assert len(told) == 1
    assert [line for line in server.shown if "refused" in line] == told
    assert server.rounds.roster.missing(2) == [("a client", "never connected")]


@pytest.mark.parametrize(
    ("told", "who", "why"),
    [
        (
            refusal("c", "the node's configuration is wrong:\n  x: y"),
            "c",
            "the node's configuration is wrong: x: y",
        ),
        (refusal("", "unexpected IndexError in enrol"), "node 3", "unexpected IndexError in enrol"),
        ("site a b: no name", "node 3", "site a b: no name"),
        # The name is only a claim; site a takes part.
        (refusal("a", "has a seat already"), "a", "has a seat already"),
    ],
)
def test_refusing_node_is_told_by_its_site(tmp_path: Path, told: str, who: str, why: str) -> None:
    server = Server(tmp_path, {1: "a", 2: "b", 3: "c"})
    request = server.rounds.request("enrol", -1, 0, NoFields())
    server.nodes.replies["enrol 3"] = write(failure(request.header, told))
    server.enrol()
    assert server.rounds.roster.refused == {who: why}
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}
    assert server.rounds.roster.missing(2) == []


def test_later_enrolment_lifts_a_refusal(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "b", 2: "a"})
    request = server.rounds.request("enrol", -1, 0, NoFields())
    server.nodes.replies["enrol 2"] = write(
        failure(request.header, refusal("a", "the node's configuration is wrong"))
    )
    server.nodes.joining[5.0] = (3, "a")
    server.enrol()
    assert server.rounds.roster.refused == {}
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}


def test_many_refused_nodes_are_counted(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b"} | dict.fromkeys(range(3, 400), "a" * 65))
    server.enrol()
    assert len(server.shown) < 220
    assert server.rounds.roster.refused["further nodes"] == "197 more were refused"
    with pytest.raises(RunFailed) as caught:
        server.rounds.require_quorum(0, "are left")
    assert len(str(caught.value).splitlines()) < 25


# ----- records ------------------------------------------------------------------------------------


def test_refused_reply_is_logged_but_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An enrolment has no blobs, so the server does not parse any."""
    server = Server(tmp_path, {1: "a", 2: "b", 3: "c"})
    read_headers = list[bytes]()
    monkeypatch.setattr("espalier.messages.ledger.data_bytes", read_headers.append)
    monkeypatch.setattr("espalier.messages.contract.tensor_specs", read_headers.append)
    request = server.rounds.request("enrol", -1, 0, NoFields())
    content = write(MessageBody(request.header, ENROLMENT.model_dump()))
    content["blobs"] = ArrayRecord(
        {f"{number}": Array("", (), STYPE, b"x" * 1000) for number in range(50)}
    )
    server.nodes.replies["enrol 3"] = content
    server.enrol()
    assert read_headers == []
    (entry,) = [
        entry for entry in server.ledger() if entry.get("refused") and entry["kind"] == "enrol"
    ]
    assert (entry["block"], entry["raw_bytes"], entry["kind"], entry["client"]) == (
        None,
        None,
        "enrol",
        -1,
    )
    assert 50_000 < entry["wire_bytes"] < 52_000


def test_late_sites_hold_nobody_up(tmp_path: Path) -> None:
    """Every few seconds a node with another name connects, before the last one has answered."""
    server = Server(tmp_path, {1: "a", 2: "b"})
    server.nodes.silent = {3}
    server.nodes.joining = {0.0: (3, "c")} | {
        5.0 * number: (10 + number, f"s-{number}") for number in range(1, 1000)
    }
    server.enrol()
    assert server.time.seconds <= 60.0
    assert {seat.site for seat in server.rounds.roster.seats.values()} <= {
        "a",
        "b",
        *(f"s-{number}" for number in range(13)),
    }
