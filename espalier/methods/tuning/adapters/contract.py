"""Contracts of all methods that average LoRA adapters.

Clients send adapter tensors and a few counts, nothing else.

Before the first round only the request is sent, since every client makes the first adapters from
the run's seed. Later the global adapters are sent: ``push`` brings all parts but the last, and
``train`` brings the last.
"""

from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.contract import BlockSpecs, CheckValues, Contract
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.messages.parts import (
    PartRequest,
    Push,
    Reply,
    Report,
    require_result_wanted,
    require_samples,
    require_some_steps,
)
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.tensors import (
    Trained,
    before_round,
    blob_specs,
    of_round,
    parts,
    trained,
)
from espalier.methods.tuning.adapters.values import Values
from espalier.models.plan import PlanOf
from espalier.settings.run import RunSettings

MAX_SAMPLES = 1_000_000_000
"""Maximum number of training sequences that a client may report; they are its weight in a mean."""
OBSERVER = (
    "Adapters trained on this client's data. Their difference from the adapters that were sent to"
    " it is the sum of the optimiser's steps of one round. With one step this tells nearly as much"
    " as the gradient of the sequences, from which training text can be recovered in part. More"
    " tokens (the site's `min-tokens`) and more steps make this harder, not impossible. Whoever"
    " knows one of the sequences can recognise that it was used for training, whatever"
    " `min-tokens` says. The server chooses the initial adapters, and so it influences what it"
    " learns. With `client-weights` = `samples` only: the number of training sequences. Also the"
    " client's next rank, how many steps failed, and how long the training took."
)
"""Observer sentence of the contract of ``train``."""
PRIVATE_OBSERVER = (
    "Adapters trained on this client's data by DP-SGD: every record's or group's gradient is"
    " clipped and Gaussian noise is added to their sum. Whoever reads all replies of the client in"
    " this run learns of any one record or group no more than `privacy.epsilon` and `privacy.delta`"
    " allow, if `privacy.noise` is `secure`."
)
"""Observer sentence of ``train`` in a private run."""


class Order(Fields):
    """Fields of a request to train."""

    rank_limit: int = Field(ge=1)
    """Maximum rank of the adapters that the client trains."""


class PartOrder(PartRequest):
    """Fields of a request for blobs of an earlier reply."""

    rank_limit: int = Field(ge=1)
    """Maximum rank of the adapters that the client trains."""
    rank: int = Field(ge=1)
    """Rank that the client reported; in its blobs, rows and columns beyond it are zero."""


class TuningReport(Report):
    """Fields of a reply with adapters."""

    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of training sequences if it is the client's weight in the mean; else 0.

    All sequences of the client count, even if the round did not use all of them.
    """
    skipped_steps: int = Field(ge=0)
    """Number of steps that were skipped because their loss or gradient was not finite."""
    rank: int = Field(ge=1)
    """Largest rank of the client's adapters after the round.

    It is the ``rank_limit`` of the request, or a lower rank with self-pruning. Rows and columns
    beyond it are zero.
    """


@dataclass(frozen=True)
class ExtraBlobs:
    """Blobs that some methods add to every request."""

    specs: BlockSpecs = field(default_factory=dict)
    """Specs of these blobs."""
    check: CheckValues = lambda key, blob: None
    """Check of the values of these blobs."""


NOTHING = ExtraBlobs()


def contract(
    request: MessageBody,
    plan_of: PlanOf,
    run: RunSettings,
    kind_of_order: type[Order] = Order,
    trained: Trained = trained,
    kind_of_report: type[TuningReport] = TuningReport,
    extra: ExtraBlobs = NOTHING,
    observer: str = OBSERVER,
) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    Raises ProtocolError if the rank limit exceeds the largest rank of the settings, or if there is
    no such part.

    Parameters
    ----------
    kind_of_order : fields of ``train``
    trained : function that returns the trained tensors
    kind_of_report : fields of the reply
    extra : blobs that every request includes
    observer : what a person who reads the reply to ``train`` learns
    """
    fetches = request.header.kind == "fetch"
    kind: type[Order | PartOrder] = PartOrder if fetches else kind_of_order
    order = validate(kind, request.fields)
    _require_rank(order.rank_limit, run)
    adapters = trained(plan_of(), run, order.rank_limit)
    sent = of_round(adapters, run, request.header.server_round)
    received = before_round(adapters, run, request.header.server_round)
    round_parts = parts(adapters, run, request.header.server_round)
    specs = blob_specs(received, run)
    last = {key: specs[key] for key in round_parts[-1]}
    # Two instances, since the ranks of the request must not count for the reply.
    arrived = Values(received, run)
    values = Values(sent, run)

    def fits(report: TuningReport) -> None:
        _require_report(report, order.rank_limit, run)
        values.require_rank(report.rank)

    def fits_too(_: NoFields) -> None:
        # A later part has no report; the rank is that of the request for the part.
        if isinstance(order, PartOrder):
            values.require_rank(order.rank)

    reply = Reply(
        order=kind_of_order,
        part_order=PartOrder,
        report=kind_of_report,
        specs=blob_specs(sent, run),
        parts=round_parts,
        observer=PRIVATE_OBSERVER if run.privacy.on else observer,
        more="Further adapter tensors, as in train.",
        request_blobs=last | dict(extra.specs) if request.header.server_round > 1 else {},
        fetched_with=extra.specs,
        check_request=_either(extra, arrived.check),
        check_values=values.check,
        check_report=fits,
        check_part=fits_too,
    )
    return reply.contract(request, run)


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` with a part of the global adapters."""
    if request.header.server_round > run.federation.rounds:
        require_result_wanted(run)
    return push_of(request, plan_of, run, trained)


def push_of(
    request: MessageBody,
    plan_of: PlanOf,
    run: RunSettings,
    trained: Trained,
    extra: ExtraBlobs = NOTHING,
    first: int = 0,
) -> Contract:
    """Return the contract of ``push_contract`` for a method with other tensors or blobs.

    It is also the contract of a pushed result. Raises ProtocolError if the rank limit exceeds the
    largest rank of the settings, or if there is no such part.

    Parameters
    ----------
    trained : function that returns the trained tensors
    extra : blobs that every request includes
    first : number of the first part
    """
    order = validate(Order, request.fields)
    _require_rank(order.rank_limit, run)
    all_adapters = trained(plan_of(), run, order.rank_limit)
    adapters = before_round(all_adapters, run, request.header.server_round)
    push = Push(
        order=Order,
        specs=blob_specs(adapters, run),
        parts=parts(all_adapters, run, request.header.server_round),
        observer="That a part of the global adapters arrived, and nothing else.",
        check_values=_either(extra, Values(adapters, run).check),
        first=first,
        extra=extra.specs,
    )
    return push.contract(request, run)


def _either(extra: ExtraBlobs, otherwise: CheckValues) -> CheckValues:
    """Return a check that applies ``extra.check`` to its blobs and ``otherwise`` to all others."""
    return lambda key, blob: extra.check(key, blob) if key in extra.specs else otherwise(key, blob)


def _require_rank(rank_limit: int, run: RunSettings) -> None:
    """Check that the rank limit does not exceed the largest rank of the settings."""
    if rank_limit > run.lora.rank:
        raise ProtocolError(
            f"message: rank_limit is above {run.lora.rank}, the largest rank of [lora]"
        )


def _require_report(report: TuningReport, rank_limit: int, run: RunSettings) -> None:
    if report.rank > rank_limit:
        raise ProtocolError(f"TuningReport: rank is above {rank_limit}, the order's rank_limit")
    if report.rank < rank_limit and not run.of(AdapterAveraging).lowers_ranks:
        raise ProtocolError(
            f"TuningReport: rank is below {rank_limit}, the order's rank_limit, and no client gives"
            " up ranks here"
        )
    require_samples("TuningReport: samples", report.samples, run)
    require_some_steps("TuningReport", report.skipped_steps, run.training.steps)


EXAMPLES: dict[Kind, dict[str, Any]] = {
    "train": {"rank_limit": 8},
    "fetch": {"rank_limit": 8, "rank": 8},
    "push": {"rank_limit": 8},
    "local_baseline": {"rank_limit": 4},
}
"""Example fields for a model of two blocks by kind; the contract of the kind depends on them."""
