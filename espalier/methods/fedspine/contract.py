"""Contracts of FedSpine: a device's cut is agreed first, then adapters of its shape are exchanged.

From round 2 on, the first ``deliver`` of a round asks a device to cut its model to a pruning ratio.
The device replies with a bit per prunable group: 1 = cut. Every later request of the round includes
these bits, so that all tensor shapes are a function of the request, even at a site that lost its
state. Importance scores never leave the device.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.group_bits import bit_specs, read_bits, require_step
from espalier.messages.contract import Contract, Side
from espalier.messages.evaluation import LOSS_DIGITS, MAX_LOSS
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.methods.fedpetuning import contract as tuning
from espalier.methods.fedpetuning.contract import Along, TuningReport
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Groups
from espalier.models.plan import ModelPlan, PlanOf
from espalier.models.structure import structured_plan
from espalier.settings.run import RunSettings

STRUCTURE = "structure"
"""Key of the blob with the cut."""
TERM_DIGITS = 3
"""Significant digits of ``SpineReport.taylor``."""
MAX_TERM = 1e30
"""Maximum value of ``SpineReport.taylor``."""
SLACK = 1e-9
"""Tolerance for a pruning ratio whose terms were added in another order."""


class CutOrder(Fields):
    """Fields of a request to cut the model."""

    pruned: float = Field(ge=0, lt=1)
    """Pruning ratio p_t over all prunable groups, including those that were cut before."""


class SpineReport(TuningReport):
    """Fields of a reply with adapters."""

    loss_before: float = Field(ge=0, le=MAX_LOSS)
    """Mean loss of the first half of the round's steps, in nats."""
    loss_after: float = Field(ge=0, le=MAX_LOSS)
    """Mean loss of the second half of the round's steps, in nats."""
    taylor: float = Field(ge=0, le=MAX_TERM)
    """First term of equation 14, averaged over the steps."""


def shortened(term: float) -> float:
    """Return a term as it is sent: rounded to a few digits, so that it reveals little."""
    return float(f"{min(term, MAX_TERM):.{TERM_DIGITS}g}")


def trained(
    plan: ModelPlan, run: RunSettings, rank_limit: int | None = None, structure: bytes | None = None
) -> AdapterPlan:
    """Return the adapters of a device.

    Ranks and scalings are those of the uncut model; the shapes follow from the device's cut. An
    encoder's classification head reads features that no cut removes, so it is the same on every
    device.

    Parameters
    ----------
    plan
        Plan of the uncut model.
    run
        Settings of the run.
    rank_limit
        Maximum rank; None for the ranks of the settings.
    structure
        Blob with the device's cut; None for the uncut model.
    """
    adapters = tuning.trained(plan, run, rank_limit)
    if structure is None:
        return adapters
    blocks = _smaller(plan, structure).blocks
    own = {
        index: tuple(replace(one, linear=blocks[index].linear(one.linear.name)) for one in several)
        for index, several in adapters.blocks.items()
    }
    return replace(adapters, blocks=own)


@lru_cache(maxsize=64)
def _smaller(plan: ModelPlan, structure: bytes) -> ModelPlan:
    """Return the plan of the cut model.

    Raises
    ------
    ProtocolError
        If the blob is not a valid cut.
    """
    groups = Groups.of(plan)
    return structured_plan(plan, groups.structure(read_bits(groups, structure)))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    beside = _beside(plan_of()) if request.header.server_round > 1 else None
    shapes = partial(trained, structure=request.blobs.get(STRUCTURE))
    made = tuning.training_contract(
        request, plan_of, run, tuning.Order, shapes, SpineReport, beside
    )
    up = replace(made.up, check_fields=partial(_check_report, made.up))
    return replace(
        made, up=up, observer=OBSERVER if made.observer == tuning.OBSERVER else made.observer
    )


def _check_report(up: Side, report: Fields) -> None:
    if up.check_fields is not None:
        up.check_fields(report)
    if not isinstance(report, SpineReport):
        return
    for name in ("loss_before", "loss_after"):
        if (value := getattr(report, name)) != round(value, LOSS_DIGITS):
            raise ProtocolError(f"SpineReport: {name} has more than {LOSS_DIGITS} decimals")
    if report.taylor != shortened(report.taylor):
        raise ProtocolError(f"SpineReport: taylor has more than {TERM_DIGITS} digits")


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` message: a request to cut, or a part of adapters.

    The adapters have the shapes of the device's cut. In a round, part 0 is the request to cut, and
    the adapters begin with part 1. The result is pushed with the number of the round after the last
    one; its adapters begin with part 0.
    """
    header = request.header
    # The result is pushed with the number of the round after the last one.
    in_a_round = header.server_round <= run.federation.rounds
    if in_a_round and header.part == 0:
        return _question(request, plan_of(), run)
    shapes = partial(trained, structure=request.blobs.get(STRUCTURE))
    return tuning.delivery_of(request, plan_of, run, shapes, _beside(plan_of()), int(in_a_round))


def _beside(plan: ModelPlan) -> Along:
    groups = Groups.of(plan)
    return Along({STRUCTURE: bit_specs(groups)}, lambda _, blob: _read(groups, blob))


def _read(groups: Groups, blob: bytes) -> None:
    read_bits(groups, blob)


def _question(request: MessageBody, plan: ModelPlan, run: RunSettings) -> Contract:
    groups = Groups.of(plan)
    job = run.of(FedSpineSettings)
    asked = validate(CutOrder, request.fields)
    specs = {STRUCTURE: bit_specs(groups)}
    # Without the blob the request is refused anyway; this value is then not used.
    known = request.blobs.get(STRUCTURE)
    before = groups.none if known is None else read_bits(groups, known)

    def within_the_share(order: Fields) -> None:
        if isinstance(order, CutOrder) and order.pruned > groups.wanted(job) + SLACK:
            raise ProtocolError(
                f"CutOrder: pruned is above the run's pruning ratio, {job.pruning_ratio:g}"
            )

    def is_a_step(_: str, blob: bytes) -> None:
        require_step(groups, before, read_bits(groups, blob), asked.pruned, job)

    return Contract(
        kind="deliver",
        method=run.method,
        down=Side(CutOrder, specs, lambda _, blob: _read(groups, blob), within_the_share),
        up=Side(NoFields, specs, is_a_step),
        observer=ASKED,
    )


def largest_orders(
    plan: ModelPlan | None, run: RunSettings, server_round: int
) -> dict[Kind, dict[str, Any]]:
    """Return the fields of the requests with the largest replies of a round, by kind.

    An uncut device has the largest replies.
    """
    question: dict[Kind, dict[str, Any]] = {"deliver": {"pruned": 0.0}} if server_round > 1 else {}
    return question | tuning.largest_orders(plan, run, server_round)


sizes_vary = tuning.sizes_vary
ASKED = (
    "Which attention groups and feed-forward channels this client removes, one bit each: those"
    " whose weights matter least to its data. Importances never leave it, and it answers once per"
    " round. A client that lost its importances removes nothing, which shows that it lost them."
)
OBSERVER = (
    "Adapters of the client's smaller model, trained on its data: everything that is said about"
    " those of `fedpetuning` applies. The mean loss of the first and of the second half of the"
    " round's steps on its own data, three decimals each, and a term of the importance of its LoRA"
    " modules, three digits. With `client-weights` = `samples` only: the number of training"
    " sequences. Also how many steps failed, and how long the training took."
)

EXAMPLES: dict[Kind, Mapping[str, Any]] = {**tuning.EXAMPLES, "deliver": {"pruned": 0.1}}
"""Example fields by kind; the contract of the kind depends on them."""
