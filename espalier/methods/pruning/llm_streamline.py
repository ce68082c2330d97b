"""LLM-Streamline: settings and contracts.

Adjacent blocks that hardly change their input are removed. One trained layer can take their place.

In the first round clients send similarities. In later rounds the layer is exchanged: ``push``
pushes all its parts but the last, and the last comes with ``train``; the client replies with the
trained layer. The first of these rounds starts from a block of the base model, which every client
has.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from espalier.amounts import count
from espalier.errors import InputError, ProtocolError
from espalier.messages.contract import CheckValues, Contract
from espalier.messages.message import Fields, Kind, MessageBody, validate
from espalier.messages.parts import (
    MAX_SAMPLES,
    PartRequest,
    Push,
    Reply,
    Report,
    parts_of,
    require_result_wanted,
    require_samples,
    require_some_steps,
    require_tokens,
    values_within,
)
from espalier.messages.tensor_blobs import TensorSpec, wire_specs
from espalier.models.plan import BlockPlan, ModelPlan, PlanOf
from espalier.settings.pruning import SmallerSettings, ratio_field
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.training import MAX_DECAYED, MAX_LEARNING_RATE, TrainingSettings

WEIGHT_DECAY = 1e-3
"""Weight decay of AdamW."""


class LlmStreamlineSettings(SmallerSettings):
    """Table ``[llm-streamline]`` (Chen et al. 2025, section 2)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "client-weights", "max-weight-ratio", "aggregation-rule", "max-update-ratio",
        "wire-dtype",
    )  # fmt: skip
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean",)
    WHY_NO_OTHER_RULE = (
        "a complete layer is averaged one client at a time, and a median would need those of all"
        " clients in memory"
    )
    ROUNDS: ClassVar[int] = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    FIRST_PUSH: ClassVar[int] = 2
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1, 2)
    READ_WITH: ClassVar[ReadWith] = {
        key: {"replacement": ("layer",)} for key in ("steps", "batch-size", "learning-rate")
    }

    pruning_ratio: float = ratio_field(gt=0, lt=1)
    replacement: Literal["layer", "none"] = Field(
        "layer",
        description=(
            "Replacement of the removed blocks: one trained layer, for which one more block is"
            " removed, or nothing."
        ),
    )
    last_hidden_state: Literal["after-norm", "before-norm"] = Field(
        "after-norm",
        description=(
            "Hidden state that counts as the last block's output when blocks are compared:"
            " `after-norm`, after the model's final norm, as in the published code; `before-norm`,"
            " the output itself."
        ),
    )
    steps: int = Field(
        50,
        ge=1,
        description="Number of optimiser steps of a client in each round that trains the layer.",
    )
    batch_size: int = Field(8, ge=1, description="Number of samples in an optimiser step.")
    learning_rate: float = Field(
        2e-4,
        gt=0,
        le=MAX_LEARNING_RATE,
        description="Maximum learning rate of AdamW; it falls as a cosine over all rounds.",
    )

    @model_validator(mode="after")
    def _no_step_is_forgotten(self) -> "LlmStreamlineSettings":
        # As in ``TrainingSettings``, whose weight decay is no key of this table.
        decayed = self.learning_rate * WEIGHT_DECAY * self.steps
        if decayed > MAX_DECAYED:
            raise ValueError(
                f"steps = {self.steps}: learning-rate x weight decay ({WEIGHT_DECAY}) x steps ="
                f" {decayed:g} is above {MAX_DECAYED:g}, so that a round's first steps are"
                " forgotten; lower steps or learning-rate"
            )
        return self

    @property
    def training(self) -> TrainingSettings:
        """Training of the replacement layer as a ``[training]`` table."""
        return TrainingSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            schedule="cosine",
            weight_decay=WEIGHT_DECAY,
        )

    @property
    def compares_after_norm(self) -> bool:
        """True if the last block's output is compared after the model's final norm."""
        return self.last_hidden_state == "after-norm"

    @property
    def has_local_baseline(self) -> bool:
        """True if a layer is trained: a local baseline then trains a layer of its own.

        Without a layer, a client's own choice of blocks needs no message.
        """
        return self.replacement == "layer"

    def fewer_blocks(self, num_blocks: int) -> int:
        """Return by how many blocks the model becomes shorter.

        Raises InputError if no block would be left.
        """
        # The small constant absorbs rounding errors of the product.
        num_removed = math.ceil(self.pruning_ratio * num_blocks - 1e-9)
        if num_removed >= num_blocks:
            raise InputError(
                f"pruning.ratio = {self.pruning_ratio}: of {count(num_blocks, 'block')} none would"
                " stay; lower it"
            )
        return num_removed

    def span(self, num_blocks: int) -> int:
        """Return how many adjacent blocks are removed, one more if a layer replaces them."""
        return self.fewer_blocks(num_blocks) + (self.replacement == "layer")

    def asked_of_sites(self, run: RunSettings) -> Mapping[str, tuple[str, int]]:
        """Return the steps and sequences of a round of training, and the tokens of a step."""
        if self.replacement == "none":
            return {}
        tokens = self.batch_size * run.data.sequence_length
        return {
            "max_batch_tokens": ("llm-streamline.batch-size x data.sequence-length", tokens),
            "max_steps": ("llm-streamline.steps", self.steps),
        }

    def num_rounds(self, federation: FederationSettings) -> int:
        """Return the number of rounds: one that compares blocks, and those that train the layer."""
        return 1 + federation.rounds * (self.replacement == "layer")

    def contradictions(
        self, method: str, federation: FederationSettings, lora: object, num_clients: int
    ) -> list[str]:
        """Return an error line if ``federation.rounds`` is set although no layer is trained."""
        if self.replacement == "none" and federation.rounds != self.ROUNDS:
            return [
                f"federation.rounds = {federation.rounds}: with {method}.replacement = 'none'"
                " nothing is trained, and blocks are compared in one round; leave"
                " federation.rounds out"
            ]
        return []


SIMILARITY_KEY = "similarity"
"""Key of the blob of the first round."""
COSINES = "cosines"
"""Name of the tensor in the blob of the first round."""
ROUNDING = 1e-3
"""Maximum rounding error of a cosine; a computed one may exceed 1 by this amount."""


class SimilarityReport(Report):
    """Fields of a reply with similarities."""

    tokens: int = Field(ge=1)
    """Number of tokens over which the cosines are averaged."""


class Replace(Fields):
    """Fields of a request to train the layer."""

    start: int = Field(ge=0)
    """Number of the first block that the layer replaces."""


class ReplacePart(Replace, PartRequest):
    """Fields of a request for blobs of an earlier reply."""


class LayerReport(Report):
    """Fields of a reply with the trained layer."""

    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of calibration samples if it is the client's weight in the mean; else 0."""
    skipped_steps: int = Field(ge=0)
    """Number of steps that were skipped because their loss or gradient was not finite."""


def num_starts(plan: ModelPlan, run: RunSettings) -> int:
    """Return the number of block ranges that may be replaced."""
    return len(plan.blocks) - run.of(LlmStreamlineSettings).span(len(plan.blocks)) + 1


def layer_shapes(block: BlockPlan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block's matrices, biases and norms by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in block.linears:
        shapes[f"{linear.name}.weight"] = linear.shape
        if linear.bias:
            shapes[f"{linear.name}.bias"] = linear.shape[:1]
    return shapes | {name: shape for name, shape in block.others if name.startswith("norm.")}


def layer_specs(plan: ModelPlan, run: RunSettings, start: int) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a layer, one per tensor.

    A blob with all tensors of a block might be too large for a message.
    """
    shapes = layer_shapes(plan.blocks[start])
    return {
        name: wire_specs({name: shape}, run.federation.wire_dtype) for name, shape in shapes.items()
    }


def layer_parts(plan: ModelPlan, run: RunSettings, start: int) -> list[list[str]]:
    """Return the blob keys of each part of a layer; both directions have the same parts."""
    return parts_of(layer_specs(plan, run, start), run.part_bytes)


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    Raises ProtocolError if the start or the part does not exist.
    """
    plan = plan_of()
    if request.header.server_round == 1:
        return _similarities(plan, run).contract(request, run)
    kind = ReplacePart if request.header.kind == "fetch" else Replace
    order = validate(kind, request.fields)
    _require_start(order.start, plan, run)
    specs = layer_specs(plan, run, order.start)
    last = parts_of(specs, run.part_bytes)[-1]
    check = _values_of(plan, run, order.start)

    def check_report(report: LayerReport) -> None:
        require_samples("LayerReport: samples", report.samples, run)
        steps = run.of(LlmStreamlineSettings).steps
        require_some_steps("LayerReport", report.skipped_steps, steps)

    return Reply(
        order=Replace,
        part_order=ReplacePart,
        report=LayerReport,
        specs=specs,
        observer=OBSERVER_OF_LAYER,
        more="Further tensors of the layer, as in train.",
        request_blobs={key: specs[key] for key in last} if request.header.server_round > 2 else {},
        check_request=check,
        check_values=check,
        check_report=check_report,
    ).contract(request, run)


def _similarities(plan: ModelPlan, run: RunSettings) -> Reply:
    def check_report(report: SimilarityReport) -> None:
        require_tokens("SimilarityReport", report.tokens, run)

    return Reply(
        report=SimilarityReport,
        specs={SIMILARITY_KEY: {COSINES: TensorSpec("F32", (num_starts(plan, run),))}},
        observer=OBSERVER,
        more="",
        check_values=values_within(1 + ROUNDING),
        check_report=check_report,
    )


def _values_of(plan: ModelPlan, run: RunSettings, start: int) -> CheckValues:
    """Return the check that the numbers of a layer's blobs can be read and are finite."""
    shapes = layer_shapes(plan.blocks[start])

    def check(key: str, blob: bytes) -> None:
        from espalier.messages.blobs.adapters import unpack_adapters

        unpack_adapters({key: shapes[key]}, blob, run.federation.wire_dtype)

    return check


def _require_start(start: int, plan: ModelPlan, run: RunSettings) -> None:
    if start >= (starts := num_starts(plan, run)):
        raise ProtocolError(
            f"message: start is above {starts - 1}, where the last stretch of blocks begins"
        )


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` with a part of the layer.

    If no layer is trained, it pushes only the number of the first block that is removed. Raises
    ProtocolError if the start or the part does not exist, or if nothing is pushed in this round.
    """
    order = validate(Replace, request.fields)
    plan = plan_of()
    _require_start(order.start, plan, run)
    job = run.of(LlmStreamlineSettings)
    last = job.num_rounds(run.federation)
    trained = job.replacement == "layer"
    if request.header.server_round == 2 <= last:
        raise ProtocolError(
            "message: a push of round 2 does not exist, it begins with a block of the base model"
        )
    if request.header.server_round > last:
        require_result_wanted(run)
    push = Push(
        order=Replace,
        specs=layer_specs(plan, run, order.start) if trained else {},
        observer="That a part of the layer arrived, and nothing else.",
        check_values=_values_of(plan, run, order.start),
    )
    return push.contract(request, run)


OBSERVER = (
    "One number for every sequence of neighbouring blocks that may be removed: the cosine between"
    " its input and its output, as a mean over this client's samples. Also the number of tokens,"
    " and how long the work took."
)
OBSERVER_OF_LAYER = (
    "One layer, trained on hidden states of this client's samples. Its difference from the layer"
    " that was sent to the client is the sum of the optimiser's steps. With one step this tells"
    " nearly as much as a gradient, from which text may be recovered in part. More tokens (the"
    " site's `min-tokens`) and more steps make this harder, not impossible. The server chooses"
    " the initial layer, and so it influences what it learns. With `client-weights` = `samples`:"
    " the number of calibration samples. Also how many steps failed, and how long the training"
    " took."
)

EXAMPLES: dict[Kind | tuple[Kind, int], dict[str, Any]] = {
    ("train", 2): {"start": 0},
    "fetch": {"start": 0},
    "push": {"start": 0},
}
"""Example fields for a model of two blocks, by kind, or by kind and round.

The contract of the kind depends on them.
"""


METHOD = Row(
    title=(
        "LLM-Streamline (neighbouring blocks that change least give way to one layer, whose"
        " weights are averaged)"
    ),
    settings=LlmStreamlineSettings,
    strategy="strategies.pruning.llm_streamline:LlmStreamline",
    job="client_app.methods.pruning.llm_streamline",
    summands_reason=("has no fixed point with a bound for similarities and layers"),
    dry_run="server_app.estimate.messages.pruning:DryLlmStreamline",
    work="server_app.estimate.work.pruning:OneLayer",
    outcome="server_app.artifacts.structured_model:StructuredOutcome",
    baseline="strategies.baselines:llm_streamline_of_all",
)
