"""Estimate of a client's replies in a run, derived from the contracts before anything is sent.

A contract is a function of the request. If requests depend on choices of the server (a rank,
layers, a pruning ratio), the request with the largest reply counts: ``largest_orders(plan, run,
server_round)`` in the contracts of a method returns its fields by kind, and ``sizes_vary(run)`` is
True if smaller replies are possible. In a method without ``largest_orders`` requests have no
fields.

Covers: names, dtypes, shapes and bytes of tensors, names of fields.
Does not cover: headers of blobs and messages, some kilobytes per message; messages that are sent
again after a loss.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.contracts import contract_for, of_method
from espalier.messages.evaluation import Texts
from espalier.messages.message import Kind, MessageBody, request_header
from espalier.messages.parts import last_rounds, parts_of
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT

Orders = Callable[[ModelPlan | None, RunSettings, int], Mapping[Kind, Mapping[str, Any]]]
"""Function that returns the fields of a round's requests with the largest replies, by kind."""
WHOLE = 1 << 62
"""Part size in bytes that holds any reply."""


class _NoModelError(Exception):
    """Error of a contract that depends on a model which has not been pushed yet."""


@dataclass(frozen=True)
class Answer:
    """Reply of a client to one kind of message in one round."""

    kind: Kind
    server_round: int
    """Number of the round; 0 before the first."""
    specs: BlockSpecs | None
    """Specs of all blobs, including those of later parts.

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


KINDS: tuple[Kind, ...] = (
    "enrol", "deliver", "train", "shares", "masked", "confirm", "unmask", "local_baseline", "evaluate"
)  # fmt: skip
"""Kinds in the order in which a client receives them; a ``fetch`` is included in its ``train``."""


def outlook(plan: ModelPlan | None, run: RunSettings) -> Outlook:
    """Return the estimate of a client's replies.

    Parameters
    ----------
    plan : plan of the client's model; None if the server has yet to push it
    """

    def plan_of() -> ModelPlan:
        if plan is None:
            raise _NoModelError
        return plan

    ends = last_rounds(plan_of, run)
    answers = tuple(_answers(run, plan, plan_of, ends[0]))
    sampled = "sampled-clients" in run.job.FEDERATION and run.federation.sampled_clients < 1
    varies: Callable[[RunSettings], bool] = getattr(
        of_method(run.method), "sizes_vary", lambda _: False
    )
    return Outlook(answers, ends[0], len(ends) - 1, sampled or varies(run))


def _answers(
    run: RunSettings, plan: ModelPlan | None, plan_of: Callable[[], ModelPlan], rounds: int
) -> Iterator[Answer]:
    yield _answer(run, plan_of, "enrol", 0, {})
    orders: Orders = getattr(of_method(run.method), "largest_orders", lambda *_: {"train": {}})
    for server_round in range(1, rounds + 1):
        for kind, fields in orders(plan, run, server_round).items():
            yield _answer(run, plan_of, kind, server_round, fields)
        for kind in SECURE_KINDS if run.federation.secure_sum else ():
            yield _answer(run, plan_of, kind, server_round, {})
    evaluated = run.evaluation.local_baseline or run.evaluation.own_text
    # Clients are asked only if the result is evaluated, stored, or needs fitting.
    if run.job.has_local_baseline and (
        evaluated
        or run.job.fits_local_baseline(run.federation)
        or getattr(run.job, "keep_models", False)
    ):
        yield _answer(run, plan_of, "local_baseline", rounds, {})
    if evaluated:
        on_text = run.evaluation.local_baseline and run.task.name == TEXT
        names = list(run.evaluation.named_texts()) if on_text else []
        texts = Texts.of_run(run, names, 1)
        yield _answer(run, plan_of, "evaluate", rounds, texts.model_dump())


def _answer(
    run: RunSettings,
    plan_of: Callable[[], ModelPlan],
    kind: Kind,
    server_round: int,
    fields: Mapping[str, Any],
) -> Answer:
    """Return the reply to a request without blobs.

    The contract is that of an undivided reply; the number of parts is computed from its specs.
    """
    header = request_header(run.method, kind, server_round)
    # An undivided reply shows all blobs in one contract.
    whole = run.model_copy(update={"part_bytes": WHOLE})
    try:
        contract: Contract = contract_for(MessageBody(header, dict(fields)), plan_of, whole)
    except _NoModelError:
        return Answer(
            kind,
            server_round,
            None,
            1,
            (),
            f"{kind}: the server sends the model; see docs/privacy-reference.md",
        )
    specs = contract.up.blobs
    messages = max(1, len(parts_of(specs, run.part_bytes))) if kind == "masked" else 1
    if kind == "train":
        messages = contract_for(MessageBody(header, dict(fields)), plan_of, run).num_parts
    return Answer(
        kind,
        server_round,
        specs,
        messages,
        tuple(contract.up.fields.model_fields),
        contract.observer,
    )
