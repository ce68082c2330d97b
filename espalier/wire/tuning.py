"""Contracts of all methods that tune: adapter tensors and a few counts, nothing else.

Before the first round nothing but the order goes down, since every client makes the first adapters from the run's seed. Later
the global adapters do: all parts but the last are brought by ``deliver``, and the last comes with the order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field
from torch import Tensor

from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.adapter_payload import payload_specs, unpack_adapters
from espalier.wire.adapters import AdapterPlan, adapter_plan
from espalier.wire.contract import BlockSpecs, CheckValues, Contract
from espalier.wire.messages import Kind, Letter, Scalars, validate
from espalier.wire.parts import (
    Delivery,
    PartRequest,
    Reply,
    Report,
    parts_of,
    require_result_wanted,
)
from espalier.wire.payload import TensorSpec
from espalier.wire.plan import ModelPlan, PlanOf

MOST_SAMPLES = 1_000_000_000
"""Training sequences that a client may report; they are its weight in an average."""


class Order(Scalars):
    """What a client is asked to train."""

    rank_limit: int = Field(ge=1)
    """No adapter that it trains has a larger rank."""


class PartOrder(PartRequest):
    """Which blobs of an earlier reply the server asks for."""

    rank_limit: int = Field(ge=1)
    rank: int = Field(ge=1)
    """Rank that the client reported: in what it sends, further ones are zero."""


class TuningReport(Report):
    """What a client reports beside its adapters."""

    samples: int = Field(ge=0, le=MOST_SAMPLES)
    """Training sequences that it has, whether or not the round came to all of them, where they are its weight; else 0, which
    tells nothing."""
    skipped_steps: int = Field(ge=0)
    """Steps that were left out, because their loss or gradient was not finite."""
    rank: int = Field(ge=1)
    """Largest rank of the adapters that it goes on with: that of the order, or with self-pruning a lower one, and further ones
    are zero."""


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """What the run trains, or what of it a client with this limit does."""
    lora = run.of(AdapterAveraging).lora_of(run.lora, len(plan.blocks))
    adapters = adapter_plan(plan, lora, run.task.num_classes)
    return adapters if rank_limit is None else adapters.limited(rank_limit)


Trained = Callable[[ModelPlan, RunSettings, int], AdapterPlan]
"""What a method trains, given a rank limit."""
trained_adapters: Trained = trained


@dataclass(frozen=True)
class Along:
    """What comes with every request beside adapters, where a method has any."""

    specs: BlockSpecs = field(default_factory=dict)
    check: CheckValues = lambda key, blob: None
    """Gets the blobs of ``specs`` alone."""


def blob_specs(adapters: AdapterPlan, run: RunSettings) -> dict[str, Mapping[str, TensorSpec]]:
    """The blobs that hold all adapters, in order."""
    return {
        key: payload_specs(shapes, run.federation.payload)
        for key, shapes in adapters.shapes().items()
    }


def parts(adapters: AdapterPlan, run: RunSettings) -> list[list[str]]:
    """Which blobs travel in which part, the same in both directions."""
    return parts_of(blob_specs(adapters, run), run.part_bytes)


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    return training_contract(request, plan_of, run, Order)


def training_contract(
    request: Letter,
    plan_of: PlanOf,
    run: RunSettings,
    kind_of_order: type[Order],
    trained: Trained | None = None,
    kind_of_report: type[TuningReport] = TuningReport,
    beside: Along | None = None,
) -> Contract:
    """The same, of a method whose orders or reports say more, that trains other tensors, or sends something beside them."""
    header = request.header
    fetched = request.header.kind == "fetch"
    order: Order | PartOrder = (
        validate(PartOrder, request.scalars)
        if fetched
        else validate(kind_of_order, request.scalars)
    )
    _require_rank(order.rank_limit, run)
    adapters = (trained or trained_adapters)(plan_of(), run, order.rank_limit)
    cut = parts(adapters, run)
    specs = blob_specs(adapters, run)
    arrived = Values(adapters, run)
    values = Values(adapters, run)
    along = beside or Along()

    def fits(report: Scalars) -> None:
        if isinstance(report, TuningReport):
            _require_report(report, order.rank_limit, run)
        told = report if isinstance(report, TuningReport) else order
        if not isinstance(told, Order):
            values.require_rank(told.rank)

    reply = Reply(
        order=kind_of_order,
        part_order=PartOrder,
        report=kind_of_report,
        specs=specs,
        parts=cut,
        observer=OBSERVER,
        more="further adapter tensors, as in train",
        brought=(
            {key: specs[key] for key in cut[-1]} | dict(along.specs)
            if header.server_round > 1
            else {}
        ),
        fetched_with=along.specs,
        check_brought=_either(along, arrived.check),
        check_values=values.check,
        check_report=fits,
    )
    return reply.contract(request, run.method)


def largest_orders(
    plan: ModelPlan | None, run: RunSettings, server_round: int
) -> dict[Kind, dict[str, Any]]:
    """Scalars of the requests of a round whose answers are largest: a client trains all ranks."""
    return {"train": {"rank_limit": run.of(AdapterAveraging).largest_limit(run.lora)}}


def sizes_vary(run: RunSettings) -> bool:
    """Whether clients have ranks of their own."""
    return run.of(AdapterAveraging).limits_differ


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``deliver`` message: a part of the global adapters."""
    if request.header.server_round > run.federation.rounds:
        require_result_wanted(run)
    return delivery_of(request, plan_of, run, trained)


def delivery_of(
    request: Letter,
    plan_of: PlanOf,
    run: RunSettings,
    trained: Trained,
    beside: Along | None = None,
    first: int = 0,
) -> Contract:
    """The same of what a method trains; the result too. ``first`` is the number of the first part."""
    along = beside or Along()
    order = validate(Order, request.scalars)
    _require_rank(order.rank_limit, run)
    adapters = trained(plan_of(), run, order.rank_limit)
    delivery = Delivery(
        order=Order,
        specs=blob_specs(adapters, run),
        parts=parts(adapters, run),
        observer="that a part of the global adapters arrived, nothing else",
        check_values=_either(along, Values(adapters, run).check),
        first=first,
        beside=along.specs,
    )
    return delivery.contract(request, run.method)


def _either(beside: Along, otherwise: CheckValues) -> CheckValues:
    """Checks a blob that comes beside adapters, and one of adapters."""
    return lambda key, blob: (
        beside.check(key, blob) if key in beside.specs else otherwise(key, blob)
    )


def _require_rank(rank_limit: int, run: RunSettings) -> None:
    """A request is for a rank that the adapters have."""
    if rank_limit > run.lora.largest_rank:
        raise Mistake(
            f"message: rank_limit is above {run.lora.largest_rank}, the largest rank of [lora]"
        )


def _require_report(report: TuningReport, rank_limit: int, run: RunSettings) -> None:
    if report.rank > rank_limit:
        raise Mistake(f"TuningReport: rank is above {rank_limit}, the order's rank_limit")
    if report.rank < rank_limit and not run.of(AdapterAveraging).lowers_ranks:
        raise Mistake(
            f"TuningReport: rank is below {rank_limit}, the order's rank_limit, and no client gives"
            " up ranks here"
        )
    if (report.samples > 0) != (run.federation.client_weights == "samples"):
        raise Mistake(
            "TuningReport: samples are told with federation.client-weights = 'samples' alone"
        )
    if report.skipped_steps >= run.training.steps:
        raise Mistake(
            f"TuningReport: skipped_steps must be below the {run.training.steps} steps of a round"
        )


class Values:
    """Holds the values of a message's blobs against their payload, and then all of them against a rank."""

    def __init__(self, adapters: AdapterPlan, run: RunSettings) -> None:
        self._shapes = adapters.shapes()
        self._payload = run.federation.payload
        self._rank_in_use = 0

    def check(self, key: str, blob: bytes) -> None:
        """The numbers of a blob can be read, and are finite."""
        try:
            tensors = unpack_adapters(self._shapes[key], blob, self._payload)
        except Mistake as mistake:
            raise Mistake(f"{key} {mistake}") from None
        self._rank_in_use = max(self._rank_in_use, rank_in_use(tensors))

    def require_rank(self, rank: int) -> None:
        """In all blobs that were checked, what is beyond a rank is zero."""
        if self._rank_in_use > rank:
            raise Mistake(f"blobs: not zero beyond rank {rank}, which the client reports")


def rank_in_use(tensors: Mapping[str, Tensor]) -> int:
    """The largest rank of which a row of an A, or a column of a B, is not zero; tensors by canonical name."""
    largest = 0
    for name, tensor in tensors.items():
        if name.endswith((".lora_a", ".lora_b")):
            used = (tensor != 0).any(dim=1 if name.endswith(".lora_a") else 0).nonzero()
            largest = max(largest, int(used.max()) + 1 if len(used) else 0)
    return largest


OBSERVER = (
    "adapters trained on this client's data, whose difference from those that it was sent is the"
    " sum of its optimiser's steps: what one round tells, with one step little less than the"
    " gradient of its sequences, from which training text can be recovered in part; more tokens"
    " (the site's `least-tokens`) and steps make it harder, not impossible; whoever knows one of"
    " its sequences can recognise that it was trained on, whatever `least-tokens` says; the server"
    " chooses the adapters to begin with, so it chooses at what it looks; with `client-weights` ="
    " `samples` alone, how many training sequences it has; how many steps failed; which rank it"
    " goes on with; and how long it took"
)
"""What the contract of ``train`` says of an observer."""

EXAMPLES: dict[Kind, dict[str, Any]] = {
    "train": {"rank_limit": 8},
    "fetch": {"rank_limit": 8, "rank": 8},
    "deliver": {"rank_limit": 8},
    "alone": {"rank_limit": 4},
}
"""Scalars of requests to a model of two blocks, by kind: what the contracts of the kind depend on."""
