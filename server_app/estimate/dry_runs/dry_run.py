"""Run of a method's strategy without clients and tensors: the messages of a run before it starts.

The strategy itself decides who is asked for what. ``DryRounds`` answers each request from its
contract and records the sizes of both. What a strategy computes from replies is replaced in one
place, ``DryRun.fold``, by an assumption of what the computation leads to. Assumptions on data or
chance may differ between ``CASES``: the fewest bytes, the usual number, the most bytes.

Covers: a run in which no client fails and no message is repeated. Enrolment is not part of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import torch
from flwr.serverapp import Grid

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened import OpenedModel
from espalier.identity.names import NO_LINEAGE
from espalier.messages.contracts import contract_for
from espalier.messages.evaluation import OWN_TEXT_MODELS, Texts
from espalier.messages.message import MessageBody
from espalier.settings.run import RunSettings
from server_app.estimate.exchange import HASH, Exchange, fields_of_reply
from strategies.base.evaluation import ClientEvaluation, ClientFigures
from strategies.base.federation import Federation
from strategies.base.inbox import Inbox
from strategies.base.method import Method
from strategies.base.progress import Clock
from strategies.base.roster import Roster, Seat
from strategies.base.rounds import FollowUp, Patience, Rounds
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder

Case = Literal["least", "usual", "most"]
CASES: tuple[Case, ...] = get_args(Case)


class DryRun(Method):
    """Method that asks no client and computes nothing; base class of those of all methods.

    A subclass inherits from this class first and then from a strategy. The run takes place when an
    object is made; ``exchanges`` has its messages.

    Parameters
    ----------
    texts : request of the evaluation at clients
    """

    def __init__(
        self, settings: RunSettings, model: OpenedModel, texts: Texts, case: Case = "usual"
    ) -> None:
        self.case = case
        silent = SimpleNamespace(**dict.fromkeys(("begin", "step", "note"), lambda *_, **__: None))
        computing = Computing(torch.device("cpu"), torch.float32, 1)
        run = SimpleNamespace(
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
        self.exchanges: dict[int, list[Exchange]] = defaultdict(list)
        """Exchanges with each client, in order."""
        run.rounds = DryRounds(cast(Run, run), self.exchanges, self.known_fields, self.known_blobs)
        super().__init__(cast(Run, run), _Evaluation(cast(Run, run), texts))
        self._federation = DryFederation(self)
        self._federation.carry_out()

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on apart from the settings, in words; may be empty."""
        return ""

    def known_fields(self, request: MessageBody) -> dict[str, Any]:
        """Return the fields of a reply that are not numbers, or whose values matter here."""
        header = request.header
        if header.kind == "train":
            return {"blob_sha256": [HASH] * self._federation.num_blobs(header.client)}
        if header.kind == "evaluate":
            texts = Texts(**request.fields)
            return {
                "losses": [0.0] * len(texts.names),
                "test_scores": [0.0] * len(texts.test_metrics),
                "own_losses": [0.0] * len(OWN_TEXT_MODELS if texts.own_text else ()),
            }
        return {}

    def known_blobs(self, request: MessageBody) -> dict[str, bytes]:
        """Return the blobs of a reply that are read here; their size follows from the contract."""
        return {}

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Assume what the replies of a round lead to; by default nothing that messages show."""


class DryFederation(Federation):
    """Course of a run whose replies have no blobs, without checkpoints."""

    def num_blobs(self, client: int) -> int:
        """Return the number of blobs of a client's reply in the present round."""
        return sum(map(len, self._orders[client].parts))

    def _aggregate(
        self, server_round: int, replies: Iterable[MessageBody], quorum_of: int | None
    ) -> None:
        """Receive the replies, and assume what they lead to."""
        clients = []
        for body in replies:
            if body.header.kind == "train":
                clients.append(body.header.client)
            self._note_arrival(body)
        self.method.fold(server_round, cast(Inbox, None), clients)

    def _save(self, server_round: int) -> None:
        """Write no checkpoint."""


class DryRounds(Rounds):
    """Rounds in which every client of a run takes part, and answers as its contracts demand."""

    def __init__(
        self,
        run: Run,
        exchanges: dict[int, list[Exchange]],
        known_fields: Callable[[MessageBody], dict[str, Any]],
        known_blobs: Callable[[MessageBody], dict[str, bytes]],
    ) -> None:
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
        self.exchanges = exchanges
        self.known_fields = known_fields
        self.known_blobs = known_blobs
        self._sizes: dict[Any, tuple[Exchange, dict[str, Any]]] = {}

    def exchange(
        self,
        requests: Iterable[MessageBody],
        follow_up: FollowUp = lambda _: None,
        patience: Patience = lambda _: 0.0,
    ) -> Iterator[MessageBody]:
        """Yield the reply to each request, and to those that follow it."""
        for first in requests:
            request: MessageBody | None = first
            while request is not None:
                reply = self._reply(request)
                yield reply
                request = follow_up(reply if request is first else request)

    def _reply(self, request: MessageBody) -> MessageBody:
        """Return the reply to a request, and record both.

        Many clients get the same request, whose size is computed once.
        """
        header = request.header
        place = (header.kind, header.server_round, header.part)
        key = (*place, repr(request.fields), *sorted(request.blobs.items()))
        if key not in self._sizes:
            contract = contract_for(request, lambda: self.plan, self.settings)
            known = self.known_fields(request)
            fields = fields_of_reply(contract.up.fields, known)
            self._sizes[key] = Exchange.of(request, contract, fields), fields
        exchange, fields = self._sizes[key]
        self.exchanges[header.client].append(exchange)
        return MessageBody(header, fields, self.known_blobs(request))


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


class _Evaluation(ClientEvaluation):
    """Evaluation by the clients, whose request has no texts yet."""

    def __init__(self, run: Run, texts: Texts) -> None:
        self.run = run
        self.asked = bool(texts.names or texts.test_items or texts.own_text)
        self._texts = texts
        self._blobs: dict[str, bytes] = {}
        self.figures = ClientFigures()
