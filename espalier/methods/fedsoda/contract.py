"""Contracts of FedSODA: the server pushes a sub-model and LoRA; clients send LoRA of the adapter.

Clients have no base model. ``deliver`` pushes the sub-model, which is identified by the hash of its
files, and the emulator's LoRA, before the first round and after each alignment. From the second
round on it also pushes the adapter's LoRA. Clients send the same as in all tuning methods.
"""

from dataclasses import replace
from typing import Any

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.model_pieces import Lacking, Offer, Piece, piece_specs, require_pieces
from espalier.messages.contract import Contract, Side
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.messages.parts import Delivery, Sha256
from espalier.methods.fedpetuning import contract as fedpetuning
from espalier.methods.fedsoda.settings import FedSodaSettings
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import ModelPlan, PlanOf
from espalier.settings.run import RunSettings

NEVER = 0
"""Version of an emulator without LoRA, that is, one that was never aligned."""


class SubModelOrder(fedpetuning.Order):
    """Fields of a request to train on a sub-model."""

    model_sha256: Sha256
    """Hash of the folder of the sub-model."""
    aligned: int = Field(ge=0)
    """Round before which the emulator's LoRA was last aligned; 0 if it has none."""


class EmulatorPart(Fields):
    """Fields of a message with a part of the emulator's LoRA."""

    what: str = Field("emulator", pattern="^emulator$")
    blocks: list[int] = Field(min_length=1)
    """Numbers of the sub-model's blocks that have this LoRA, ascending."""
    aligned: int = Field(ge=1)
    """Round before which it was aligned."""


def emulator_adapters(plan: ModelPlan, run: RunSettings, blocks: list[int]) -> AdapterPlan:
    """Return the LoRA adapters of some blocks of the emulator.

    Parameters
    ----------
    plan
        Plan of the sub-model.
    run
        Settings of the run.
    blocks
        Numbers of the blocks.

    Raises
    ------
    ProtocolError
        If the blocks are not ascending, or if a block does not belong to the emulator.
    """
    emulator = run.of(FedSodaSettings).emulator_of(len(plan.blocks))
    if blocks != sorted(set(blocks)) or blocks[0] < emulator[0] or blocks[-1] > emulator[-1]:
        raise ProtocolError(
            f"message: blocks must be ascending and within {emulator[0]} to {emulator[-1]}"
        )
    return adapter_plan(plan, run.lora.model_copy(update={"layers": ",".join(map(str, blocks))}))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    made = fedpetuning.training_contract(request, plan_of, run, SubModelOrder)
    return replace(made, observer=TRAINED) if made.observer == fedpetuning.OBSERVER else made


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` message, which the field ``what`` selects.

    It is an offer of the sub-model, a piece of it, a part of its emulator's LoRA, or a part of the
    adapter's LoRA.

    Raises
    ------
    ProtocolError
        If there is no such part, or if nothing of the kind is pushed in this round.
    """
    what = request.fields.get("what")
    header = request.header
    if what in ("model", "piece") and header.part:
        raise ProtocolError(f"message: part {header.part} of a {what} does not exist, it has one")
    if what == "model":
        offered = validate(Offer, request.fields).manifest()

        def of_these(answer: Fields) -> None:
            if isinstance(answer, Lacking):
                require_pieces(answer.pieces, len(offered.piece_sha256))

        return Contract(
            "deliver", run.method, Side(Offer), Side(Lacking, check_fields=of_these), OFFERED
        )
    if what == "piece":
        down = Side(Piece, piece_specs(validate(Piece, request.fields)))
        return Contract(
            "deliver", run.method, down, Side(NoFields), "that a piece of the sub-model arrived"
        )
    if what == "emulator":
        return _emulator(request, plan_of, run)
    if header.server_round == 1:
        raise ProtocolError(
            "message: the adapter's LoRA is delivered in round 1, whose first one comes from the"
            " run's seed"
        )
    return fedpetuning.delivery(request, plan_of, run)


def _emulator(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    told = validate(EmulatorPart, request.fields)
    if not run.of(FedSodaSettings).aligns:
        raise ProtocolError(
            "message: LoRA of the emulator is delivered, but the settings align nothing"
        )
    if told.aligned > request.header.server_round:
        raise ProtocolError(
            f"message: LoRA of the emulator is of round {told.aligned}, which is to come"
        )
    adapters = emulator_adapters(plan_of(), run, told.blocks)
    delivery = Delivery(
        order=EmulatorPart,
        specs=fedpetuning.blob_specs(adapters, run),
        parts=fedpetuning.parts(adapters, run),
        observer="That a part of the emulator's LoRA arrived, and nothing else.",
        check_values=fedpetuning.Values(adapters, run).check,
    )
    return delivery.contract(request, run)


def largest_orders(
    plan: ModelPlan | None, run: RunSettings, server_round: int
) -> dict[Kind, dict[str, Any]]:
    """Return the fields of the requests with the largest replies of a round, by kind."""
    order = {
        **fedpetuning.largest_orders(plan, run, server_round)["train"],
        "model_sha256": _HASH,
        "aligned": NEVER,
    }
    offered: dict[Kind, dict[str, Any]] = {"deliver": OFFER} if server_round == 1 else {}
    return offered | {"train": order}


_HASH = "0" * 64
OFFER = {
    "what": "model", "names": ["config.json"], "sizes": [8], "file_sha256": [_HASH], "piece_bytes": 1024,
    "piece_sha256": [_HASH],
}  # fmt: skip
"""Fields of an offer of the smallest model."""
TRAINED = fedpetuning.OBSERVER.replace(
    "The server chooses the initial adapters,",
    "The server chooses the model, its tokenizer and the initial adapters,",
)
OFFERED = (
    "Which pieces of the sub-model this node lacks, and so whether it took part in a run with the"
    " same sub-model before."
)

EXAMPLES: dict[Kind | tuple[Kind, int], dict[str, Any] | list[dict[str, Any]]] = {
    "alone": fedpetuning.EXAMPLES["alone"],
    "fetch": fedpetuning.EXAMPLES["fetch"],
    "train": {**fedpetuning.EXAMPLES["train"], "model_sha256": _HASH, "aligned": 1},
    "deliver": [
        OFFER,
        {"what": "piece", "model_sha256": _HASH, "index": 0, "size": 8},
        {"what": "emulator", "blocks": [0], "aligned": 1},
    ],
    ("deliver", 2): fedpetuning.EXAMPLES["deliver"],
}
"""Example fields by kind, or by kind and round; the contract of the kind depends on them.

The sub-model and its emulator's LoRA are pushed before round 1, the adapter's LoRA from round 2 on.
"""
