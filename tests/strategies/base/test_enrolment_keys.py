"""Enrolment of names that are bound to keys."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import InputError
from espalier.identity.site_keys import PublicKeys
from espalier.messages.enrolment import refusal
from espalier.messages.message import MessageBody, NoFields, failure
from espalier.messages.records import read, write
from strategies.base.rounds import RunFailed
from tests.strategies.base.enrolling_nodes import ENROLMENT, Server, signed
from tests.strategies.base.test_enrolment_lines import assert_harmless

OF_SITES = {
    site: ec.derive_private_key(number, ec.SECP384R1())
    for number, site in enumerate("abcd", start=1)
}
PUBLIC = {site: key.public_key() for site, key in OF_SITES.items() if site != "d"}


def with_keys(folder: Path, sites: dict[int, str], keys: str, **more: Any) -> Server:
    """Return a server with the keys of a, b and c.

    ``keys`` names the key of each node, in order; a hyphen stands for no key.
    """
    server = Server(folder, sites, keys=PUBLIC, **more)
    server.nodes.keys = {
        node_id: OF_SITES[key] for node_id, key in enumerate(keys, start=1) if key != "-"
    }
    return server


def refused_nodes(server: Server) -> dict[str, str]:
    return server.rounds.roster.refused


def test_who_has_a_sites_key_has_its_seat(tmp_path: Path) -> None:
    server = with_keys(tmp_path, {1: "a", 2: "b"}, "ab")
    server.enrol()
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}
    assert sorted(server.train()) == [0, 1]
    assert refused_nodes(server) == {}


@pytest.mark.parametrize(
    ("says", "key", "reason"),
    [
        ("b", "a", "claims to be b, but does not have the key of b in site-keys"),
        (
            "b",
            "-",
            (
                "claims to be b, but did not prove it; set site-key in --node-config to its"
                " private key"
            ),
        ),
        (
            "d",
            "d",
            (
                "claims to be d, but site-keys has no key of this site; put d.key.pub there if it"
                " may take part"
            ),
        ),
        ("nobody", "a", "claims to be nobody, but site-keys has no key of this site"),
    ],
)
def test_node_without_key_blocks_no_seat(tmp_path: Path, says: str, key: str, reason: str) -> None:
    """The wrong node enrols before the site; other nodes do not learn of the refusal."""
    server = with_keys(tmp_path, {1: says, 2: "a"}, f"{key}ab")
    server.nodes.joining[20.0] = (3, "b")
    server.enrol()
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}
    assert [server.rounds.roster.seats[client].node_id for client in (0, 1)] == [2, 3]
    assert refused_nodes(server).keys() == {"node 1"}
    assert refused_nodes(server)["node 1"].startswith(reason)
    assert any(line.startswith(f"refused      node 1: {reason}") for line in server.shown)


def test_seat_needs_site_s_key(tmp_path: Path) -> None:
    """The holder stops answering; of four nodes with its name, the one with its key gets it."""
    server = with_keys(tmp_path, {1: "a", 2: "b"}, "abbc-a", quorum=0.5)
    server.enrol()
    server.nodes.silent = {1}
    start = server.time.seconds
    server.nodes.joining = {start + number / 10: (3 + number, "a") for number in range(4)}
    assert sorted(server.train()) == [0, 1]
    assert server.asked_to_train() == [1, 2, 1, 6]
    assert refused_nodes(server).keys() == {"node 3", "node 4", "node 5"}


def test_a_signature_is_passed_on_in_vain(tmp_path: Path) -> None:
    """Node 1 lets b sign the request that node 1 received; b signs with its own node id."""
    server = with_keys(tmp_path, {1: "b", 2: "a"}, "-a", quorum=0.5)
    push = server.nodes.push_messages

    def relay(messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        if message.metadata.dst_node_id == 1 and read(message.content).header.kind == "enrol":
            request = read(message.content)
            told = ENROLMENT.model_copy(update={"site": "b"})
            relayed = told.model_dump() | {"signature": signed(OF_SITES["b"], told, request, 77)}
            server.nodes.replies["enrol 1"] = write(MessageBody(request.header, relayed))
        return push([message])

    server.nodes.push_messages = relay  # type: ignore[method-assign]
    server.enrol()
    assert server.rounds.roster.clients() == {"a": 0}
    assert "does not have the key of b" in refused_nodes(server)["node 1"]


def test_a_signature_is_good_for_one_request(tmp_path: Path) -> None:
    """The run resumes in another process, and a node replays its earlier reply."""
    first = with_keys(tmp_path / "first", {1: "a", 2: "b"}, "ab")
    seen = dict[int, Message]()
    pull = first.nodes.pull_messages
    first.nodes.pull_messages = lambda ids: [
        seen.setdefault(m.metadata.src_node_id, m) for m in pull(ids)
    ]  # type: ignore[method-assign]
    first.enrol()
    second = with_keys(tmp_path / "second", {1: "a", 2: "b"}, "ab", quorum=0.5)
    second.nodes.replies["enrol 2"] = seen[2].content
    second.enrol(first.rounds.roster.clients())
    assert second.rounds.roster.seats[0].node_id == 1
    # Node id 0 means that the site has not enrolled.
    assert second.rounds.roster.seats[1].node_id == 0
    assert "does not have the key of b" in refused_nodes(second)["node 2"]


def test_node_s_reason_is_not_its_site_s_word(tmp_path: Path) -> None:
    server = with_keys(tmp_path, {1: "a", 2: "b", 3: "c"}, "abc")
    request = server.rounds.request("enrol", -1, 0, NoFields())
    server.nodes.replies["enrol 3"] = write(
        failure(request.header, refusal("b", "too little text"))
    )
    server.enrol()
    assert refused_nodes(server) == {"node 3": "claims to be b: too little text"}


@settings(max_examples=60)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "signature": (
                st.text(max_size=300)
                | st.text("0123456789abcdef", min_size=188, max_size=196)
                | st.binary()
            ),
            "site": st.sampled_from(["a", "b", "x", ""]) | st.text(),
        },
    )
)
def test_false_signature_costs_its_sender_alone(
    changes: dict[str, Any],
) -> None:
    with TemporaryDirectory() as folder:
        server = with_keys(Path(folder), {1: "a", 2: "b", 3: "c"}, "ab")
        request = server.rounds.request("enrol", -1, 0, NoFields())
        content = write(MessageBody(request.header))
        content["fields"] = ConfigRecord({**ENROLMENT.model_dump(), "site": "c", **changes})
        server.nodes.replies["enrol 3"] = content
        server.enrol()
        assert server.rounds.roster.clients() == {"a": 0, "b": 1}
        assert refused_nodes(server).keys() == {"node 3"}
        for line in [*server.shown, *refused_nodes(server).values()]:
            assert_harmless(line)


def test_equal_enrolments_are_of_equal_bytes(tmp_path: Path) -> None:
    """Nonces and signatures differ each time but have the same length."""
    servers = [
        with_keys(tmp_path / name, {1: "a", 2: "b", 3: "c"}, "abc") for name in ("one", "two")
    ]
    for server in servers:
        server.enrol()
    assert servers[0].ledger() == servers[1].ledger()
    assert len([entry for entry in servers[0].ledger() if entry["kind"] == "enrol"]) == 6


def test_a_key_that_came_after_the_start_counts(tmp_path: Path) -> None:
    """A site may make its key while the run waits for sites."""
    server = with_keys(tmp_path, {1: "a", 2: "b"}, "ab")
    assert server.keys is not None
    later = dict(server.keys)
    server.keys = {"a": later["a"]}
    server.read_keys = lambda: later
    server.enrol()
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}
    assert refused_nodes(server) == {}


def test_half_written_key_refuses_its_node_alone(tmp_path: Path) -> None:
    def half_written() -> PublicKeys:
        raise InputError("b.key.pub: no key")

    server = with_keys(tmp_path, {1: "a", 2: "b"}, "ab")
    assert server.keys is not None
    server.keys = {"a": server.keys["a"]}
    server.read_keys = half_written
    with pytest.raises(RunFailed, match="b, but site-keys has no key of this site"):
        server.enrol()
    assert len(refused_nodes(server)) == 1


def test_refused_nodes_are_told_why(tmp_path: Path) -> None:
    """A node with a wrong key and a node without a seat learn the reason.

    Nodes that take part get no such message.
    """
    server = with_keys(tmp_path, {1: "a", 2: "b", 3: "x", 4: "c"}, "ab-c")
    told: dict[int, str] = {}
    push = server.nodes.push_messages

    def note(messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        body = read(message.content)
        if body.header.kind == "refused":
            told[message.metadata.dst_node_id] = str(body.fields["reason"])
        return push([message])

    server.nodes.push_messages = note  # type: ignore[method-assign]
    server.enrol()
    assert told.keys() == {3, 4}
    assert "site-keys has no key of this site" in told[3]
    assert told[4] == "the run already has its num-clients = 2 sites"


def test_simulated_nodes_are_told_nothing(tmp_path: Path) -> None:
    server = with_keys(tmp_path, {1: "a", 2: "b", 3: "x"}, "ab")
    server.rounds.shared_workers = True
    server.enrol()
    assert {kind for kind, _ in server.nodes.asked} == {"enrol"}


def test_surplus_sites_are_counted_apart(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "a", 2: "b", 3: "c"})
    server.enrol()
    assert [line for line in server.shown if "connected" in line][
        -1
    ] == "enrolling    3 sites, 2 take part, connected"
