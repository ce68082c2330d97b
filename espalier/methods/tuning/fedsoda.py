"""FedSODA: settings and contracts.

Clients tune the last blocks of a pruned, quantised sub-model, which the server keeps aligned with
the full model. They send LoRA of the adapter.

Clients have no base model. ``push`` brings the sub-model, which is identified by the hash of its
files, and the emulator's LoRA, before the first round and after each alignment. From the second
round on it also pushes the adapter's LoRA. Clients send the same as in all tuning methods.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from espalier.amounts import count
from espalier.errors import InputError, ProtocolError
from espalier.messages.blobs.model_pieces import (
    Lacking,
    Manifest,
    Piece,
    piece_specs,
    require_pieces,
)
from espalier.messages.contract import Contract, Side
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.messages.parts import Push, Sha256
from espalier.methods.tuning.adapters import contract as averaging
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.summands import summands
from espalier.methods.tuning.adapters.tensors import blob_specs
from espalier.methods.tuning.adapters.values import Values
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import ModelPlan, PlanOf
from espalier.settings.method import PublicTextSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.training import MAX_LEARNING_RATE, TrainingSettings


class FedSodaSettings(AdapterAveraging, PublicTextSettings):
    """Table ``[fedsoda]``; FedOT and FedBiOT are other values of the same keys, see their presets.

    The L blocks of the base model are divided into an emulator, which is pruned and stays frozen at
    the clients, and adapter blocks, whose LoRA is trained: the last ``adapter-layers`` and the
    first ``first-layers``.
    """

    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "secure-sum")
    FIRST_PUSH = 1
    ROUNDS = 10
    NEEDS_BASE_MODEL = False
    READ_WITH: ClassVar[ReadWith] = {"uniform-rounding": {"drop": ("uniform",)}}

    adapter_layers: int = Field(
        3,
        ge=1,
        description="Number of last blocks in the adapter, whose LoRA the clients train (L_A).",
    )
    first_layers: int = Field(
        0, ge=0, description="Number of first blocks that belong to the adapter too (FedOT: 1)."
    )
    drop: Literal["similar", "uniform"] = Field(
        "similar",
        description=(
            "Blocks of the emulator that are dropped: in `groups` groups of adjacent blocks with"
            " similar outputs all but the first (FedSODA), or as many blocks at equal distances"
            " (FedOT, FedBiOT). The server aligns the LoRA of these first blocks with `similar`,"
            " and that of the whole emulator with `uniform`. `training.proximal` pulls a client's"
            " LoRA to the round's global values with `similar`, and to the initial values"
            " (FedBiOT) with `uniform`."
        ),
    )
    group_layers: int = Field(
        3, ge=0, description="Number of blocks that are dropped from each group (n)."
    )
    groups: int = Field(4, ge=1, description="Number of groups of blocks (p).")
    uniform_rounding: Literal["nearest", "down"] = Field(
        "nearest",
        description=(
            "Rounding of the positions of the blocks that stay, if blocks are dropped at equal"
            " distances: `nearest` as in Offsite-Tuning's code, `down` as in the code of FedOT and"
            " FedBiOT."
        ),
    )
    emulator: Literal["nf4", "stored"] = Field(
        "nf4",
        description=(
            "Format in which clients download the sub-model: its linear layers in NF4, or as"
            " stored in the base model's files."
        ),
    )
    pre_align_steps: int = Field(
        100, ge=0, description="Number of steps of alignment before the first round; 0: none."
    )
    realign_steps: int = Field(50, ge=1, description="Number of steps of a realignment.")
    realign_every: int = Field(
        5, ge=0, description="Number of rounds between realignments (r); 0: none."
    )
    align_learning_rate: float = Field(
        1e-3,
        gt=0,
        le=MAX_LEARNING_RATE,
        description=(
            "Learning rate of alignment (AdamW). A step has `training.batch-size` public samples."
        ),
    )

    @property
    def brings_nf4(self) -> str:
        """Key and value that make clients download a model in NF4; empty if they download none."""
        return "emulator = 'nf4'" if self.emulator == "nf4" else ""

    @property
    def aligns(self) -> bool:
        """True if the server aligns the sub-model at any time."""
        return bool(self.pre_align_steps or self.realign_every)

    def realigns_in(self, server_round: int) -> bool:
        """Return whether a round begins with a realignment at the server (algorithm 2, line 9)."""
        return self.realign_every > 0 and server_round % self.realign_every == 0

    @property
    def num_dropped(self) -> int:
        """Number of blocks that are dropped."""
        return self.group_layers * self.groups

    def pulls_to_first(self, training: TrainingSettings) -> bool:
        """Return whether a proximal term pulls a client's LoRA towards its initial values."""
        return self.drop == "uniform" and training.proximal > 0

    def emulator_of(self, num_blocks: int) -> range:
        """Return the emulator's blocks in a model, full or smaller, with ``num_blocks`` blocks.

        Raises InputError if no block is left for the emulator.
        """
        blocks = range(self.first_layers, num_blocks - self.adapter_layers)
        if not blocks:
            raise InputError(
                f"fedsoda.adapter-layers = {self.adapter_layers}, first-layers ="
                f" {self.first_layers}: the model has {count(num_blocks, 'block')}, and none is"
                " left for the emulator; lower them"
            )
        return blocks

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """Return the LoRA settings of the adapter blocks."""
        emulator = self.emulator_of(num_blocks)
        first = f"0-{emulator[0] - 1}," if self.first_layers else ""
        return lora.model_copy(update={"layers": f"{first}{emulator[-1] + 1}-{num_blocks - 1}"})

    def align_training(self, training: TrainingSettings, steps: int) -> TrainingSettings:
        """Return the settings of alignment as a ``[training]`` table."""
        changes = {
            "steps": steps,
            "accumulation": 1,
            "learning-rate": self.align_learning_rate,
            "schedule": "constant",
            "weight-decay": 0.0,
            "proximal": 0.0,
        }
        return TrainingSettings.model_validate(training.model_dump(by_alias=True) | changes)

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if lora.layers != "all":
            lines.append(
                f"lora.layers = '{lora.layers}': {method}.adapter-layers says which blocks are"
                " adapted; leave it at 'all'"
            )
        if lora.merge and lora.keep_zeros:
            lines.append(
                f"lora.keep-zeros = true: clients of {method} train on another model than the base;"
                " set it to false"
            )
        return lines


NEVER = 0
"""Version of an emulator without LoRA, that is, one that was never aligned."""


class SubModelOrder(averaging.Order):
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

    Raises ProtocolError if the blocks are not ascending, or if a block does not belong to the
    emulator.
    """
    emulator = run.of(FedSodaSettings).emulator_of(len(plan.blocks))
    if blocks != sorted(set(blocks)) or blocks[0] < emulator[0] or blocks[-1] > emulator[-1]:
        raise ProtocolError(
            f"message: blocks must be ascending and within {emulator[0]} to {emulator[-1]}"
        )
    return adapter_plan(plan, run.lora.model_copy(update={"layers": ",".join(map(str, blocks))}))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    return averaging.contract(request, plan_of, run, SubModelOrder, observer=TRAINED)


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` message, which the field ``what`` selects.

    It is an offer of the sub-model, a piece of it, a part of its emulator's LoRA, or a part of the
    adapter's LoRA. Raises ProtocolError if there is no such part, or if nothing of the kind is
    pushed in this round.
    """
    what = request.fields.get("what")
    header = request.header
    if what in ("model", "piece") and header.part:
        raise ProtocolError(f"message: part {header.part} of a {what} does not exist, it has one")
    if what == "model":
        manifest = Manifest.offered(request.fields)
        num_pieces = len(manifest.piece_sha256)
        up = Side(Lacking, check_fields=lambda answer: require_pieces(answer.pieces, num_pieces))
        return Contract("push", run.method, Side(Manifest), up, OFFERED)
    if what == "piece":
        down = Side(Piece, piece_specs(validate(Piece, request.fields)))
        return Contract(
            "push", run.method, down, Side(NoFields), "that a piece of the sub-model arrived"
        )
    if what == "emulator":
        return _emulator(request, plan_of, run)
    if header.server_round == 1:
        raise ProtocolError(
            "message: the adapter's LoRA is pushed in round 1, whose first one comes from the"
            " run's seed"
        )
    return averaging.push_contract(request, plan_of, run)


def _emulator(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    part = validate(EmulatorPart, request.fields)
    if not run.of(FedSodaSettings).aligns:
        raise ProtocolError(
            "message: LoRA of the emulator is pushed, but the settings align nothing"
        )
    if part.aligned > request.header.server_round:
        raise ProtocolError(
            f"message: LoRA of the emulator is of round {part.aligned}, which is to come"
        )
    adapters = emulator_adapters(plan_of(), run, part.blocks)
    push = Push(
        order=EmulatorPart,
        specs=blob_specs(adapters, run),
        observer="That a part of the emulator's LoRA arrived, and nothing else.",
        check_values=Values(adapters, run).check,
    )
    return push.contract(request, run)


_HASH = "0" * 64
OFFER = {
    "what": "model", "names": ["config.json"], "sizes": [8], "file_sha256": [_HASH],
    "piece_bytes": 1024, "piece_sha256": [_HASH],
}  # fmt: skip
"""Fields of an offer of the smallest model."""
TRAINED = averaging.OBSERVER.replace(
    "The server chooses the initial adapters,",
    "The server chooses the model, its tokenizer and the initial adapters,",
)
OFFERED = (
    "Which pieces of the sub-model this node lacks, and so whether it took part in a run with the"
    " same sub-model before."
)

EXAMPLES: dict[Kind | tuple[Kind, int], dict[str, Any] | list[dict[str, Any]]] = {
    "local_baseline": averaging.EXAMPLES["local_baseline"],
    "fetch": averaging.EXAMPLES["fetch"],
    "train": {**averaging.EXAMPLES["train"], "model_sha256": _HASH, "aligned": 1},
    "push": [
        OFFER,
        {"what": "piece", "model_sha256": _HASH, "index": 0, "size": 8},
        {"what": "emulator", "blocks": [0], "aligned": 1},
    ],
    ("push", 2): averaging.EXAMPLES["push"],
}
"""Example fields by kind, or by kind and round; the contract of the kind depends on them.

The sub-model and its emulator's LoRA are pushed before round 1, the adapter's LoRA from round 2 on.
"""


METHOD = Row(
    title=(
        "FedSODA (LoRA of the last blocks, tuned on a pruned and quantised sub-model that the"
        " server keeps aligned)"
    ),
    settings=FedSodaSettings,
    strategy="strategies.tuning.fedsoda.strategy:FedSoda",
    job="client_app.methods.tuning.fedsoda",
    summands=summands,
    to_summands="client_app.summands.adapters:of_adapters",
    push="client_app.methods.tuning.fedsoda:answer_push",
    dry_run="server_app.estimate.messages.tuning:DryFedSoda",
    work="server_app.estimate.work.tuning:SubTuned",
    outcome="server_app.artifacts.adapters:SubModelOutcome",
    baseline="strategies.baselines:tuned",
    tunes=True,
    measured_by_round=True,
)
