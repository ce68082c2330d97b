"""Nodes that enrol, and a server that seats them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict

from espalier.identity.site_keys import PublicKeys
from espalier.messages.blobs.masks import mask_name
from espalier.messages.enrolment import Enrolment
from espalier.messages.message import MessageBody, NoFields
from espalier.messages.parts import Report
from espalier.messages.records import read, write
from espalier.messages.signed_name import sign, statement
from espalier.messages.tensor_blobs import pack_tensors
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, block_key
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from strategies.base.enrolment import Enroller
from strategies.base.progress import Progress
from strategies.base.rounds import Rounds
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
            self.rounds.request("train", seat.client, 1, NoFields())
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
