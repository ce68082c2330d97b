"""What a client's answers hold in a run of given settings, found from the contracts before anything is sent.

A contract is a function of the request. Where requests differ with what the server chooses (a rank, layers, a share to cut),
the one with the largest answer is taken: ``largest_orders(plan, run, server_round)`` of a method's contracts gives its scalars
by kind, and ``sizes_vary(run)`` says that there are smaller ones. A method without the former has requests without scalars.
Covers: names, dtypes, shapes and bytes of tensors, names of scalars.
Does not cover: headers of blobs and messages, some kilobytes a message, and what is sent again after a message was lost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from espalier.settings.lineage import NO_LINEAGE
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from espalier.wire.contract import BlockSpecs, Contract
from espalier.wire.contracts import contract_for, of_method
from espalier.wire.evaluation import Texts
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter, NoScalars
from espalier.wire.parts import parts_of
from espalier.wire.plan import ModelPlan
from espalier.wire.rounds_of_run import last_rounds

Orders = Callable[[ModelPlan | None, RunSettings, int], Mapping[Kind, Mapping[str, Any]]]
"""Of a round: scalars of the requests with the largest answers, by kind."""
WHOLE = 1 << 62
"""Bytes of a part that holds any reply."""


class _NoModelError(Exception):
    """A contract depends on a model that is not here yet."""


@dataclass(frozen=True)
class Answer:
    """What a client answers to a kind of message in one round."""

    kind: Kind
    server_round: int
    """0: before the first."""
    specs: BlockSpecs | None
    """All blobs, those of further parts too; None where they depend on a model that the server will bring."""
    messages: int
    """In how many messages they travel."""
    scalars: tuple[str, ...]
    observer: str
    """What somebody learns who reads it."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(
            spec.num_bytes for tensors in (self.specs or {}).values() for spec in tensors.values()
        )


@dataclass(frozen=True)
class Outlook:
    """What a client sends in a run."""

    answers: tuple[Answer, ...]
    rounds: int
    """As the settings plan them."""
    more_rounds: int
    """How many may be added while something is left to do."""
    varies: bool
    """The server chooses sizes, and may choose smaller ones; or it does not ask every client in every round."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors in the planned rounds."""
        return sum(answer.num_bytes for answer in self.answers)

    @property
    def is_known(self) -> bool:
        """Whether sizes can be told before the server has brought a model."""
        return all(answer.specs is not None for answer in self.answers)

    def alike(self) -> list[list[Answer]]:
        """Answers of one kind in rounds after each other that differ in size at most."""
        by_kind = sorted(
            self.answers, key=lambda answer: (KINDS.index(answer.kind), answer.server_round)
        )
        return [
            list(group)
            for _, group in groupby(
                by_kind, lambda answer: (answer.kind, answer.scalars, answer.observer)
            )
        ]


KINDS: tuple[Kind, ...] = ("enrol", "deliver", "train", "alone", "evaluate")
"""In the order in which a client meets them; what ``fetch`` asks for is counted with its ``train``."""


def outlook(plan: ModelPlan | None, run: RunSettings) -> Outlook:
    """What a client with this model sends in a run; without one, what can be said."""

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
        for kind, scalars in orders(plan, run, server_round).items():
            yield _answer(run, plan_of, kind, server_round, scalars)
    evaluated = run.clients_evaluate or run.evaluation.own_text
    if run.job.makes_alone and (
        evaluated or run.job.fits_alone(run.federation) or getattr(run.job, "keep_models", False)
    ):
        yield _answer(run, plan_of, "alone", rounds, {})
    if evaluated:
        yield _answer(run, plan_of, "evaluate", rounds, _texts(run).model_dump())


def _texts(run: RunSettings) -> Texts:
    names = (
        list(run.evaluation.named_texts()) if run.clients_evaluate and run.task.name == TEXT else []
    )
    chosen = run.evaluation
    return Texts(
        names=names,
        num_windows=[1] * len(names),
        window_tokens=chosen.window_tokens,
        own_text=chosen.own_text,
    )


def _answer(
    run: RunSettings,
    plan_of: Callable[[], ModelPlan],
    kind: Kind,
    server_round: int,
    scalars: Mapping[str, Any],
) -> Answer:
    """Of a request without blobs, whose answer is not cut into parts; then it is counted how many there are."""
    header = Header(
        schema_version=SCHEMA_VERSION, kind=kind, method=run.method, lineage=NO_LINEAGE, server_round=server_round, client=0,
        attempt=1, part=0, num_parts=1,
    )  # fmt: skip
    whole = run.model_copy(update={"part_bytes": WHOLE})
    try:
        contract: Contract = contract_for(Letter(header, dict(scalars)), plan_of, whole)
    except _NoModelError:
        return Answer(
            kind,
            server_round,
            None,
            1,
            (),
            f"{kind}: the server brings the model; see docs/privacy.md",
        )
    specs = contract.up.specs(NoScalars())
    messages = max(1, len(parts_of(specs, run.part_bytes))) if kind == "train" else 1
    return Answer(
        kind,
        server_round,
        specs,
        messages,
        tuple(contract.up.scalars.model_fields),
        contract.observer,
    )
