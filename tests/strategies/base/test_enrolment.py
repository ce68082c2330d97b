"""Enrolment: nodes that claim a name, nodes that return, and the lines shown meanwhile."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import InputError
from espalier.identity.site_keys import PublicKeys
from espalier.messages.blobs.masks import mask_name
from espalier.messages.enrolment import Enrolment, refusal
from espalier.messages.message import MessageBody, NoFields, failure
from espalier.messages.parts import Report
from espalier.messages.records import STYPE, read, write
from espalier.messages.signed_name import sign, statement
from espalier.messages.tensor_blobs import pack_tensors
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, block_key
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from strategies.base.enrolment import Enroller
from strategies.base.progress import Progress
from strategies.base.roster import Seat
from strategies.base.rounds import Rounds, RunFailed
from strategies.base.run_folder import RunFolder
from tests.in_process import FakeTime
from tests.run_names import BY_HAND

LINEAR = LinearPlan("attn.q", "weight", (96, 64))
BLOB = pack_tensors({mask_name(LINEAR.name): np.full(96, 0x5555555555555555, dtype=np.uint64)})
CODE = "c" * 64
MODEL = "d" * 64
ENROLMENT = Enrolment(
    site="x",
    code_sha256=CODE,
    model_sha256=MODEL,
    device="cpu",
    threads=1,
    capability=1.0,
    measured=False,
    approval=False,
    python="3.11.7",
    torch="2.7.0",
)


def signed(
    key: ec.EllipticCurvePrivateKey, told: Enrolment, request: MessageBody, node_id: int
) -> str:
    """Return a node's signature of its enrolment reply."""
    return sign(key, statement(told, request.fields["nonce"], request.header.lineage, node_id))


class Nodes:
    """Nodes that answer at once unless they are ``silent``.

    ``joining`` and ``leaving`` map times in seconds to nodes that connect or disconnect.
    """

    def __init__(self, sites: dict[int, str], time: FakeTime) -> None:
        self.sites = dict(sites)
        self.keys: dict[int, ec.EllipticCurvePrivateKey] = {}
        """Keys with which the nodes sign their enrolment."""
        self.time = time
        self.silent: set[int] = set()
        self.broken: set[int] = set()
        self.enrol_seconds: dict[int, float] = {}
        """Seconds that the first answer of a node takes; 0 if it is not here."""
        self.joining: dict[float, tuple[int, str]] = {}
        self.leaving: dict[float, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.replies: dict[str, RecordDict] = {}
        self._waiting: dict[str, Message] = {}
        self._ready: dict[str, float] = {}

    def get_node_ids(self) -> list[int]:
        for at in [at for at in self.joining if at <= self.time.seconds]:
            node_id, site = self.joining.pop(at)
            self.sites[node_id] = site
        for at in [at for at in self.leaving if at <= self.time.seconds]:
            self.sites.pop(self.leaving.pop(at))
        return list(self.sites)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        header = read(message.content).header
        node_id = message.metadata.dst_node_id
        name = message.metadata.__dict__["_message_id"] = f"message-{len(self.asked)}"
        self.asked.append((header.kind, node_id))
        if node_id not in self.sites or (header.kind != "enrol" and node_id in self.silent):
            return [name]
        if header.kind != "enrol" and node_id in self.broken:
            self._waiting[name] = Message(Error(5, "node unavailable"), reply_to=message)
        else:
            own = write(self._answer(read(message.content), node_id))
            content = self.replies.get(f"{header.kind} {node_id}") or own
            self._waiting[name] = Message(content, reply_to=message)
            if header.kind == "enrol":
                self._ready[name] = self.time.seconds + self.enrol_seconds.get(node_id, 0.0)
        return [name]

    def _answer(self, request: MessageBody, node_id: int) -> MessageBody:
        header = request.header
        if header.kind == "enrol":
            told = ENROLMENT.model_copy(update={"site": self.sites[node_id]})
            signature = (
                {"signature": signed(self.keys[node_id], told, request, node_id)}
                if node_id in self.keys
                else {}
            )
            return MessageBody(header, told.model_dump() | signature)
        report = Report(seconds=0.0, blob_sha256=[sha256(BLOB)])
        return MessageBody(header, report.model_dump(), {block_key(0): BLOB})

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [
            self._waiting.pop(name)
            for name in message_ids
            if name in self._waiting and self.time.seconds >= self._ready.get(name, 0.0)
        ]


class Server:
    """Server with two seats, its nodes and the lines that it showed."""

    def __init__(
        self,
        folder: Path,
        sites: dict[int, str],
        attempts: int = 2,
        quorum: float = 1.0,
        keys: PublicKeys | None = None,
        deadline_seconds: float = 5.0,
    ) -> None:
        given = {
            "num-clients": 2,
            "deadline-seconds": deadline_seconds,
            "enrol-seconds": 30.0,
            "attempts": attempts,
            "quorum": quorum,
        }
        given |= {} if keys is None else {"site-keys": "sites"}
        self.keys = keys
        self.read_keys: Callable[[], PublicKeys] | None = None
        time = FakeTime()
        plan = ModelPlan((BlockPlan(0, (LINEAR,)),), LINEAR.num_weights)
        self.nodes = Nodes(sites, time)
        self.folder = RunFolder(folder)
        self.shown = list[str]()
        progress = Progress(self.folder, time.clock(), show=self.shown.append)
        self.rounds = Rounds(
            self.nodes, parse(given), plan, BY_HAND, self.folder, progress, time.clock()
        )  # type: ignore[arg-type]
        self.time = time

    def enrol(self, clients: dict[str, int] | None = None) -> None:
        Enroller(self.rounds, CODE, MODEL, self.keys, self.read_keys).enrol(clients)

    def train(self) -> list[int]:
        """Run one round and return the clients that answered."""
        requests = [
            self.rounds.request("train", seat, 1, NoFields())
            for seat in self.rounds.roster.active()
        ]
        return [reply.header.client for reply in self.rounds.exchange(requests)]

    def asked_to_train(self) -> list[int]:
        return [node_id for kind, node_id in self.nodes.asked if kind == "train"]

    def ledger(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder.path / "ledger.jsonl").read_text().splitlines()
        ]


# ----- seats --------------------------------------------------------------------------------------


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
    requests = [server.rounds.request("train", seat, 1, NoFields()) for _ in range(2)]
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
    request = server.rounds.request("enrol", Seat(-1, "", 99), 0, NoFields())
    server.nodes.replies["enrol 99"] = write(MessageBody(request.header, other.model_dump()))
    server.enrol(clients)
    assert 30.0 <= server.time.seconds < 31.0
    assert server.rounds.roster.clients() == (clients or {"a": 0})


# ----- names that are bound to keys ---------------------------------------------------------------

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
    request = server.rounds.request("enrol", Seat(-1, "", 3), 0, NoFields())
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
        request = server.rounds.request("enrol", Seat(-1, "", 3), 0, NoFields())
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
    request = server.rounds.request("train", server.rounds.roster.seats[0], 1, NoFields())
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
    request = server.rounds.request("enrol", Seat(-1, "", 3), 0, NoFields())
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
    request = server.rounds.request("enrol", Seat(-1, "", 3), 0, NoFields())
    server.nodes.replies["enrol 3"] = write(failure(request.header, told))
    server.enrol()
    assert server.rounds.roster.refused == {who: why}
    assert server.rounds.roster.clients() == {"a": 0, "b": 1}
    assert server.rounds.roster.missing(2) == []


def test_later_enrolment_lifts_a_refusal(tmp_path: Path) -> None:
    server = Server(tmp_path, {1: "b", 2: "a"})
    request = server.rounds.request("enrol", Seat(-1, "", 2), 0, NoFields())
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
    request = server.rounds.request("enrol", Seat(-1, "", 3), 0, NoFields())
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
