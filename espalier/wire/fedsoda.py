"""Contracts of FedSODA: the sub-model and the emulator's LoRA come down; of the adapter's LoRA, what all tuning methods send.

Clients have no base model. ``deliver`` brings the sub-model, which is named by the hash of its files; then the emulator's LoRA,
before the first round and after each alignment; then, from the second round on, the adapter's.
"""

from dataclasses import replace
from typing import Any

from pydantic import Field

from espalier.settings.fedsoda import FedSodaSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire import tuning
from espalier.wire.adapters import AdapterPlan, adapter_plan
from espalier.wire.contract import Contract, Side
from espalier.wire.messages import Kind, Letter, NoScalars, Scalars, validate
from espalier.wire.model_folder import Lacking, Offer, Piece, piece_specs, require_pieces
from espalier.wire.parts import Delivery, Sha256
from espalier.wire.plan import ModelPlan, PlanOf

NEVER = 0
"""Version of an emulator whose LoRA is not there, or was never aligned."""


class SubModelOrder(tuning.Order):
    """What a client is asked to train, and on what."""

    model_sha256: Sha256
    """Hash of the sub-model's folder."""
    aligned: int = Field(ge=0)
    """The round before which the emulator's LoRA was last aligned; 0: it has none."""


class EmulatorPart(Scalars):
    """LoRA of the emulator, which comes along."""

    what: str = Field("emulator", pattern="^emulator$")
    blocks: list[int] = Field(min_length=1)
    """Blocks of the sub-model that have it, ascending."""
    aligned: int = Field(ge=1)
    """The round before which it was aligned."""


def emulator_adapters(plan: ModelPlan, run: RunSettings, blocks: list[int]) -> AdapterPlan:
    """LoRA of some of the emulator's blocks, of a sub-model of this plan.

    Raises
    ------
    Mistake
        Some are none of the emulator's blocks, or not ascending.
    """
    emulator = run.of(FedSodaSettings).emulator_of(len(plan.blocks))
    if blocks != sorted(set(blocks)) or blocks[0] < emulator[0] or blocks[-1] > emulator[-1]:
        raise Mistake(
            f"message: blocks must be ascending and within {emulator[0]} to {emulator[-1]}"
        )
    return adapter_plan(plan, run.lora.model_copy(update={"layers": ",".join(map(str, blocks))}))


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    made = tuning.training_contract(request, plan_of, run, SubModelOrder)
    return replace(made, observer=TRAINED) if made.observer == tuning.OBSERVER else made


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``deliver``: an offer of the sub-model, a piece of it, LoRA of its emulator, or of the adapter."""
    what = request.scalars.get("what")
    header = request.header
    if what in ("model", "piece") and header.part:
        raise Mistake(f"message: part {header.part} of a {what} does not exist, it has one")
    if what == "model":
        offered = validate(Offer, request.scalars).manifest()

        def of_these(answer: Scalars) -> None:
            if isinstance(answer, Lacking):
                require_pieces(answer.pieces, len(offered.piece_sha256))

        return Contract(
            "deliver", run.method, Side(Offer), Side(Lacking, check_scalars=of_these), OFFERED
        )
    if what == "piece":
        down = Side(Piece, piece_specs(validate(Piece, request.scalars)))
        return Contract(
            "deliver", run.method, down, Side(NoScalars), "that a piece of the sub-model arrived"
        )
    if what == "emulator":
        return _emulator(request, plan_of, run)
    if header.server_round == 1:
        raise Mistake(
            "message: the adapter's LoRA is delivered in round 1, whose first one comes from the"
            " run's seed"
        )
    return tuning.delivery(request, plan_of, run)


def _emulator(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    told = validate(EmulatorPart, request.scalars)
    if not run.of(FedSodaSettings).aligns:
        raise Mistake("message: LoRA of the emulator is delivered, but the settings align nothing")
    if told.aligned > request.header.server_round:
        raise Mistake(f"message: LoRA of the emulator is of round {told.aligned}, which is to come")
    adapters = emulator_adapters(plan_of(), run, told.blocks)
    delivery = Delivery(
        order=EmulatorPart,
        specs=tuning.blob_specs(adapters, run),
        parts=tuning.parts(adapters, run),
        observer="that a part of the emulator's LoRA arrived",
        check_values=tuning.Values(adapters, run).check,
    )
    return delivery.contract(request, run.method)


def largest_orders(
    plan: ModelPlan | None, run: RunSettings, server_round: int
) -> dict[Kind, dict[str, Any]]:
    """Scalars of the requests of a round whose answers are largest."""
    order = {
        **tuning.largest_orders(plan, run, server_round)["train"],
        "model_sha256": _HASH,
        "aligned": NEVER,
    }
    offered: dict[Kind, dict[str, Any]] = {"deliver": OFFER} if server_round == 1 else {}
    return offered | {"train": order}


_HASH = "0" * 64
OFFER = {
    "what": "model", "names": ["config.json"], "sizes": [8], "file_sha256": [_HASH], "piece_bytes": 8, "piece_sha256": [_HASH],
}  # fmt: skip
"""Of the smallest model."""
TRAINED = tuning.OBSERVER.replace(
    "the server chooses the adapters to begin with, so it chooses at what it looks",
    "the server chooses the model, its tokenizer and the adapters to begin with, so it chooses at"
    " what it looks",
)
OFFERED = (
    "which pieces of the sub-model this node lacks, so whether it took part in a run with the same"
    " one before"
)

EXAMPLES: dict[Kind | tuple[Kind, int], dict[str, Any] | list[dict[str, Any]]] = {
    "alone": tuning.EXAMPLES["alone"],
    "fetch": tuning.EXAMPLES["fetch"],
    "train": {**tuning.EXAMPLES["train"], "model_sha256": _HASH, "aligned": 1},
    "deliver": [
        OFFER,
        {"what": "piece", "model_sha256": _HASH, "index": 0, "size": 8},
        {"what": "emulator", "blocks": [0], "aligned": 1},
    ],
    ("deliver", 2): tuning.EXAMPLES["deliver"],
}
"""Scalars of requests by kind: what the contracts of the kind depend on. The sub-model and its emulator's LoRA are brought
before round 1, the adapter's from round 2 on."""
