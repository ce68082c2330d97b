"""Estimate of a client's replies in a run, tensor by tensor, from the dry run of its strategy.

A site does not know its number before it enrols, so the largest reply of any client counts for each
kind of message and round. A site that has no model before the run cannot make a dry run; its
messages are those of the method's examples, with unknown tensors if these depend on the model.

Covers: names, dtypes, shapes and bytes of tensors, and names of fields, in a run in which no client
fails.
Does not cover: headers of blobs and messages, some kilobytes per message; messages that are sent
again after a loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.contracts import contract_for
from espalier.messages.message import Kind
from espalier.messages.parts import last_rounds
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.methods.examples import asked, request
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from server_app.estimate.messages.dry_run import Exchange
from server_app.estimate.messages.traffic import RunTraffic

Place = tuple[Kind, int]
"""Kind of message and round."""
KINDS: tuple[Kind, ...] = (
    "enrol", "push", "train", "shares", "masked", "confirm", "unmask", "local_baseline", "evaluate"
)  # fmt: skip
"""Kinds in the order in which a client receives them; a ``fetch`` is included in its ``train``."""
LAST: tuple[Kind, ...] = ("local_baseline", "evaluate")
"""Kinds of messages after the last round."""


class _NoModelError(Exception):
    """Error of a contract that depends on a model which has not been pushed yet."""


@dataclass(frozen=True)
class Answer:
    """Reply of a client to one kind of message in one round."""

    kind: Kind
    server_round: int
    """Number of the round; 0 before the first."""
    specs: BlockSpecs | None
    """Specs of the blobs of all parts.

    None if they depend on a model that the server has yet to push.
    """
    messages: int
    """Number of messages in which the reply is sent."""
    fields: tuple[str, ...]
    """Names of the fields."""
    observer: str
    """Description of what a person who reads the reply learns."""

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(
            spec.num_bytes for tensors in (self.specs or {}).values() for spec in tensors.values()
        )

    @staticmethod
    def of(place: Place, contracts: list[Contract]) -> "Answer":
        """Return the reply whose parts have these contracts."""
        first = contracts[0]
        specs = {
            key: tensors for contract in contracts for key, tensors in contract.up.blobs.items()
        }
        fields = tuple(first.up.fields.model_fields)
        return Answer(*place, specs, len(contracts), fields, first.observer)


@dataclass(frozen=True)
class Outlook:
    """Estimate of all replies of a client in a run."""

    answers: tuple[Answer, ...]
    """Replies in the planned rounds."""
    rounds: int
    """Number of rounds that the settings plan."""
    more_rounds: int
    """Maximum number of additional rounds, which are run as long as work is left."""
    varies: bool
    """True if replies may be smaller or fewer.

    The server may choose smaller sizes, or may not ask every client in every round.
    """

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the tensors of all planned rounds."""
        return sum(answer.num_bytes for answer in self.answers)

    @property
    def is_known(self) -> bool:
        """True if all sizes are known before the server pushes a model."""
        return all(answer.specs is not None for answer in self.answers)

    def alike(self) -> list[list[Answer]]:
        """Group replies of one kind that have the same fields and observer, by kind and round.

        Replies in a group differ at most in size.
        """
        by_kind = sorted(
            self.answers, key=lambda answer: (KINDS.index(answer.kind), answer.server_round)
        )
        return [
            list(group)
            for _, group in groupby(
                by_kind, lambda answer: (answer.kind, answer.fields, answer.observer)
            )
        ]


def answers_of(exchanges: Iterable[Exchange]) -> dict[Place, Answer]:
    """Return the replies of one client, without those that only confirm what was pushed."""
    contracts_by_place: dict[Place, list[Contract]] = {}
    for exchange in exchanges:
        reply = exchange.contract.up
        if exchange.kind != "push" or reply.blobs or reply.fields.model_fields:
            kind = "train" if exchange.kind == "fetch" else exchange.kind
            contracts_by_place.setdefault((kind, exchange.server_round), []).append(
                exchange.contract
            )
    return {place: Answer.of(place, contracts) for place, contracts in contracts_by_place.items()}


def outlook(traffic: RunTraffic) -> Outlook:
    """Return the estimate of the replies of any client of a run."""
    settings = traffic.settings
    ends = last_rounds(lambda: traffic.model.plan, settings)
    largest = {("enrol", 0): _example(settings, "enrol", 0)}
    varies = len(ends) > 1 or bool(traffic.open_questions)
    for exchanges in traffic.exchanges().values():
        for place, answer in answers_of(exchanges).items():
            current = largest.setdefault(place, answer)
            varies |= current.num_bytes != answer.num_bytes
            if answer.num_bytes > current.num_bytes:
                largest[place] = answer
    planned = [
        answer
        for answer in largest.values()
        if answer.kind in LAST or answer.server_round <= ends[0]
    ]
    return Outlook(tuple(planned), ends[0], len(ends) - 1, varies or _samples(settings))


def _samples(settings: RunSettings) -> bool:
    """Return True if a round asks only some clients."""
    return "sampled-clients" in settings.job.FEDERATION and settings.federation.sampled_clients < 1


def outlook_without_model(settings: RunSettings) -> Outlook:
    """Return the estimate of the replies of a site to which the server sends the model."""
    rounds = last_rounds(_plan_to_come, settings)[0]
    places: list[Place] = [("enrol", 0), ("push", 1)]
    in_rounds: list[Kind] = ["train", *(SECURE_KINDS if settings.federation.secure_sum else ())]
    places += [(kind, number) for number in range(1, rounds + 1) for kind in in_rounds]
    if settings.evaluation.local_baseline or settings.evaluation.own_text:
        last: list[Kind] = ["local_baseline"] if settings.job.has_local_baseline else []
        places += [(kind, rounds) for kind in (*last, "evaluate")]
    answers = tuple(_example(settings, *place) for place in places)
    return Outlook(answers, rounds, 0, _samples(settings))


def _example(settings: RunSettings, kind: Kind, server_round: int) -> Answer:
    """Return the reply to the method's example of a request."""
    fields = asked(settings, kind, server_round)[0]
    if "rank_limit" in fields:
        # That of the example may be above the run's.
        fields["rank_limit"] = settings.lora.rank
    body = request(settings, kind, server_round, fields)
    try:
        return Answer.of((kind, server_round), [contract_for(body, _plan_to_come, settings)])
    except _NoModelError:
        observer = f"{kind}: the server sends the model; see docs/privacy/reference.md"
        return Answer(kind, server_round, None, 1, (), observer)


def _plan_to_come() -> ModelPlan:
    raise _NoModelError
