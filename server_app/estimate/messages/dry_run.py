"""Run of a method's strategy without clients and tensors: the messages of a run before it starts.

The strategy itself decides who is asked for what. ``DryRounds`` answers each request from its
contract and records the sizes of both: values and names, as the ledger counts them. What a strategy
computes from replies is replaced in one place, ``DryRun.fold``, by an assumption of what the
computation leads to. If sizes depend on data or chance, there are two runs: with the fewest and
with the most bytes.

Covers: a run in which no client fails and no message is repeated. Enrolment is not part of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from flwr.serverapp import Grid

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.identity.names import NO_LINEAGE
from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.evaluation import OWN_TEXT_MODELS, Texts
from espalier.messages.message import Fields, Header, Kind, MessageBody
from espalier.messages.records import num_bytes, write
from espalier.messages.sums import secure_sum
from espalier.messages.tensor_blobs import packed_bytes
from espalier.settings.run import RunSettings
from server_app.public_tests import PublicTests
from strategies.base.federation import Federation
from strategies.base.inbox import Inbox
from strategies.base.method import Method
from strategies.base.progress import Clock
from strategies.base.roster import Roster, Seat
from strategies.base.rounds import FollowUp, Patience, Reply, Request, Rounds
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder
from strategies.base.sums.exchanges import SecureSum
from strategies.base.sums.masked_sums import MaskedSum

Case = Literal["least", "most"]
HASH = "0" * 64


@dataclass(frozen=True)
class Exchange:
    """Request and its reply, with the bytes of both."""

    kind: Kind
    server_round: int
    """Round number.

    A message after the last round has that round's number, or the next one.
    """
    down: int
    up: int
    contract: Contract
    """Contract of the request and its reply."""

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.down + self.up


class DryRun(Method):
    """Method that asks no client and computes nothing; base class of those of all methods.

    A subclass inherits from this class first and then from a strategy. The run takes place when an
    object is made; ``exchanges`` has its messages.
    """

    def __init__(
        self, settings: RunSettings, model: OpenedModel, tests: PublicTests, case: Case = "most"
    ) -> None:
        self.case = case
        self.exchanges: dict[int, list[Exchange]] = defaultdict(list)
        """Exchanges with each client, in order."""
        # Strategies report their progress, which is of no interest here.
        silent = SimpleNamespace(**dict.fromkeys(("begin", "step", "note"), lambda *_, **__: None))
        computing = Computing(torch.device("cpu"), torch.float32, 1)
        namespace = SimpleNamespace(
            settings=settings,
            model=model,
            lineage=NO_LINEAGE,
            folder=SimpleNamespace(path=Path()),
            clock=Clock(),
            simulation=False,
            computing=computing,
            device=computing.device,
            progress=silent,
            checkpoint=SimpleNamespace(blobs=MemoryBlobs()),
        )
        run = cast(Run, namespace)
        namespace.rounds = DryRounds(run, self)
        # Only real sites refuse short texts; lengths of texts that were not read are assumed.
        tolerant = cast(Run, SimpleNamespace(**{**vars(namespace), "simulation": True}))
        super().__init__(run, tests.evaluation(tolerant))
        DryFederation(self).carry_out()

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on apart from the settings, in words; may be empty."""
        return ""

    def known_fields(self, request: MessageBody) -> dict[str, Any]:
        """Return the fields of a reply that are not numbers, or whose values matter here."""
        return {}

    def known_blobs(self, request: MessageBody) -> dict[str, bytes]:
        """Return the blobs of a reply that are read here; their size follows from the contract."""
        return {}

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Assume what the replies of a round lead to; by default nothing that messages show."""


class DryFederation(Federation):
    """Course of a run whose replies have no blobs, without checkpoints."""

    def _aggregate(
        self, server_round: int, replies: Iterable[MessageBody], quorum_of: int | None
    ) -> None:
        """Receive the replies, and assume what they lead to."""
        clients = []
        for body in replies:
            # Further parts of a reply come from clients that are in the list already.
            if body.header.kind == "train":
                clients.append(body.header.client)
            self._note_arrival(body)
        self.method.fold(server_round, cast(Inbox, None), clients)

    def _aggregate_sums(
        self,
        server_round: int,
        replies: Callable[[str], Iterator[MessageBody]],
        quorum_of: int | None,
    ) -> None:
        """Exchange keys, shares and summands of the right sizes, and assume what they lead to."""

        def advertise(session: str) -> Iterator[MessageBody]:
            for body in replies(session):
                self._note_arrival(replace(body, fields=secure_sum.report_of(body.fields)))
                yield body

        secure = DrySecureSum(self.rounds, self.run.checkpoint.blobs, None)
        masked = secure.masked_sum(server_round, advertise, quorum_of)
        secure.ask_to_unmask(masked)
        self.method.fold(server_round, cast(Inbox, None), masked.included)

    def _end_sums(self) -> None:
        """Delete nothing."""

    def _save(self, server_round: int) -> None:
        """Write no checkpoint."""


class DrySecureSum(SecureSum):
    """Exchanges of a secure sum whose messages have lengths and no content."""

    def _site(self, client: int) -> str:
        # The name in a simulation; those of real sites have other lengths.
        return f"node-{client:05d}"

    def _drop_equal_keys(self, reports: dict[int, dict[str, Any]]) -> None:
        """Drop nobody."""

    def _has_good_keys(self, body: MessageBody, number: str) -> bool:
        return True

    def _inbox(self) -> Inbox:
        return DryInbox()

    def _totals(self, server_round: int, inbox: Inbox, included: list[int]) -> dict[str, str]:
        return {}

    def ask_to_unmask(self, masked: MaskedSum) -> None:
        """Exchange the last messages of a sum, and compute nothing."""
        for _ in self._answers(masked, self._confirmed(masked)):
            pass


class DryInbox(Inbox):
    """Inbox that stores nothing."""

    def __init__(self) -> None:
        self._clients = set[int]()

    def receive(self, replies: Iterable[MessageBody]) -> Iterator[MessageBody]:
        """Yield the replies."""
        for body in replies:
            self._clients.add(body.header.client)
            yield body

    def complete_clients(self) -> list[int]:
        """Return the clients that replied."""
        return sorted(self._clients)

    def clear(self) -> None:
        """Remove nothing."""


class DryRounds(Rounds):
    """Rounds in which every client of a run takes part, and answers as its contracts demand."""

    def __init__(self, run: Run, method: DryRun) -> None:
        clients = range(run.settings.num_clients)
        seats = {client: Seat(client, f"client {client}", 0) for client in clients}
        super().__init__(
            cast(Grid, None),
            run.settings,
            run.model.plan,
            NO_LINEAGE,
            cast(RunFolder, None),
            run.progress,
            roster=Roster(seats),
        )
        self.method = method
        self._sizes: dict[Any, tuple[Exchange, dict[str, Any]]] = {}

    def exchange(
        self,
        requests: Iterable[Request],
        follow_up: FollowUp = lambda _: None,
        patience: Patience = lambda _: 0.0,
    ) -> Iterator[Reply]:
        """Yield the reply to each request, and to those that follow it."""
        for first in requests:
            request: Request | None = first
            while request is not None:
                reply = self._reply(request)
                yield reply
                request = follow_up(reply if request is first else request)

    def _reply(self, request: Request) -> Reply:
        """Return the reply to a request, and record both.

        Many clients get the same request, whose size is computed once.
        """
        header = request.header
        place = (header.kind, header.server_round, header.part)
        key = (*place, repr(request.fields), *sorted(request.blobs.items()))
        if key not in self._sizes:
            contract = request.contract
            # What the method knows takes precedence.
            known_fields = {
                **_implied(request, contract, self.settings),
                **self.method.known_fields(request),
            }
            fields = _fields_of_reply(contract.up.fields, known_fields)
            down = _num_bytes(header, request.fields, contract.down.blobs)
            up = _num_bytes(header, fields, contract.up.blobs)
            exchange = Exchange(header.kind, header.server_round, down, up, contract)
            self._sizes[key] = exchange, fields
        exchange, fields = self._sizes[key]
        self.method.exchanges[header.client].append(exchange)
        blobs = self.method.known_blobs(request)
        return Reply(header, fields, blobs, contract=exchange.contract)


def _implied(request: MessageBody, contract: Contract, settings: RunSettings) -> dict[str, Any]:
    """Return the fields of a reply whose lengths follow from its request or contract."""
    kind = request.header.kind
    if kind in secure_sum.KINDS or (kind == "train" and settings.federation.secure_sum):
        return secure_sum.sized_fields(request)
    if kind != "evaluate":
        return {"blob_sha256": [HASH] * sum(map(len, contract.parts))}
    texts = Texts(**request.fields)
    return {
        "losses": [0.0] * len(texts.names),
        "test_scores": [0.0] * len(texts.test_metrics),
        "own_losses": [0.0] * len(OWN_TEXT_MODELS if texts.own_text else ()),
    }


def _fields_of_reply(kind: type[Fields], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the size of real ones: 0 or False where no value is known."""
    zeros = {
        name: False if field.annotation is bool else 0 for name, field in kind.model_fields.items()
    }
    return {name: values.get(name, zero) for name, zero in zeros.items()}


def _num_bytes(header: Header, fields: Mapping[str, Any], specs: BlockSpecs) -> int:
    """Return the bytes of a message, of which no blob is built."""
    without_blobs = num_bytes(write(MessageBody(header, dict(fields))))
    return without_blobs + sum(len(key) + packed_bytes(tensors) for key, tensors in specs.items())


class MemoryBlobs:
    """Store of the few blobs on which shapes depend; all others are read as empty bytes."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        """Store a blob and return its hash."""
        key = sha256(data).hexdigest()
        self._blobs[key] = data
        return key

    def get(self, key: str) -> bytes:
        """Return a blob; empty if it was never stored."""
        return self._blobs.get(key, b"")
