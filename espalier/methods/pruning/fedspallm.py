"""FedSpaLLM: settings and contracts. Clients send masks and kept weights of the sampled layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from espalier.errors import ProtocolError
from espalier.messages.blobs.masks import (
    kept_name,
    kept_specs,
    require_exact_sparsity,
    require_kept,
    votes_specs,
)
from espalier.messages.contract import Contract, Side
from espalier.messages.enrolment import MAX_CAPABILITY
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.messages.parts import MAX_SAMPLES, PartRequest, Reply, Report, require_samples
from espalier.messages.sums.summands import SumSpec, SumSpecs
from espalier.messages.tensor_blobs import TensorSpec
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, PlanOf, block_key
from espalier.settings.method import numbers_of_clients, of_client
from espalier.settings.pruning import MASKS_HAVE_NO_NOISE, PruningSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from pruning_kernels.bounded_fixed_point import Scale, signed_bits
from pruning_kernels.selection.comparison_groups import pruned_in_matrix


class FedSpaLLMSettings(PruningSettings):
    """Table ``[fedspallm]``; terms are the paper's (section 4), a layer is a decoder block."""

    NO_MECHANISM = MASKS_HAVE_NO_NOISE
    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "client-weights", "max-weight-ratio", "aggregation-rule", "max-update-ratio",
        "secure-sum",
    )  # fmt: skip
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WHY_NO_OTHER_RULE = (
        "a weight is averaged over the clients that kept it, which are others for each weight and"
        " sometimes one"
    )
    SUMMED_WITH: ClassVar[Mapping[str, Any]] = {"fedspallm.capabilities": "1"}
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal", "samples")
    READ_WITH: ClassVar[ReadWith] = {
        "damping-mean": {"local-method": ("sparsegpt",)},
        "federation.max-update-ratio": {"local-method": ("sparsegpt",)},
    }

    local_method: Literal["sparsegpt", "wanda", "ria", "magnitude"] = Field(
        "sparsegpt",
        description=(
            "Pruning method of a client. SparseGPT changes the kept weights; the others do not."
        ),
    )
    damping_mean: Literal["live", "all"] = Field(
        "live",
        description=(
            "SparseGPT: channels whose mean square is the measure of damping (1% of it): those with"
            " input that is not zero, or all, of which dead ones count as 1, as in its published"
            " code."
        ),
    )
    aggregation: Literal["l0", "mean"] = Field(
        "l0",
        description=(
            "`l0`: mean of each weight over the clients that kept it; `mean`: mean over all"
            " clients (FedAvg of pruned weights)."
        ),
    )
    mask_expansion: bool = Field(
        True,
        description=(
            "Prune the weights that most clients pruned until the sparsity is reached. `false`:"
            " prune only weights that all clients pruned."
        ),
    )
    schedule: Literal["constant", "linear", "cubic"] = Field(
        "constant",
        description=(
            "Increase of the sparsity over the rounds: none, in equal steps, or fast at first (Zhu"
            " & Gupta 2017)."
        ),
    )
    sampled_layers: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Fraction of the layers that the most capable client prunes in a round; the others"
            " prune fewer in proportion, at least one."
        ),
    )
    capabilities: Annotated[str, numbers_of_clients(0, MAX_CAPABILITY, "1,2,4")] = Field(
        "",
        description=(
            "Capability of each client, for instance `1,2,4`, in place of what the nodes state;"
            " the last one repeats."
        ),
    )
    coverage: Literal["every-round", "over-rounds"] = Field(
        "every-round",
        description=(
            "Action if the samples cannot cover all layers: refuse the run and state the numbers,"
            " or add rounds until all layers are covered."
        ),
    )

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if self.sampled_layers < 1:
            return (
                f"fedspallm.sampled-layers = {self.sampled_layers:g}: the sum of a layer would be"
                " that of the few clients that sampled it; set it to 1"
            )
        if len(set(map(float, filter(None, self.capabilities.split(","))))) != 1:
            return (
                f"fedspallm.capabilities = '{self.capabilities}': clients of different capability"
                " prune different layers, whose sums would be those of few clients; set it to '1'"
            )
        if federation.client_weights == "samples":
            return (
                "federation.client-weights = 'samples' needs a sum of weights for each weight of"
                " the model; set it to 'equal'"
            )
        return ""

    @property
    def depends_on_text(self) -> bool:
        """True if the tensors that a client sends depend on its text."""
        return self.local_method != "magnitude"

    def measures_again(self, rounds: int) -> bool:
        """Return whether a run of this many rounds prunes a layer twice with the same samples."""
        return self.depends_on_text and rounds > 1

    @property
    def changes_weights(self) -> bool:
        """True if a client changes the weights that it keeps (SparseGPT)."""
        return self.local_method == "sparsegpt"

    @model_validator(mode="after")
    def _a_pattern_has_no_schedule(self) -> "FedSpaLLMSettings":
        if self.pattern and self.schedule != "constant":
            raise ValueError(
                f"schedule = '{self.schedule}': a pattern has one sparsity; set schedule to"
                " 'constant'"
            )
        return self

    @property
    def columns_together(self) -> int:
        """Number of columns that a client prunes at a time; 0 if rows are pruned whole.

        A pattern must not cross the boundary between two such sets of columns.
        """
        return 128 if self.local_method == "sparsegpt" else 0

    def capability_of(self, client: int) -> float:
        """Return the capability of a client from ``capabilities``; the last number repeats."""
        return float(of_client(self.capabilities, client))

    def last_rounds(
        self, federation: FederationSettings, num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """Return the rounds after which the run may end: it continues until all layers are pruned.

        Each additional round prunes at least one more layer, unless the clients that sampled it are
        lost in that round. A client is lost only once, which bounds the number of rounds.
        """
        return range(federation.rounds, federation.rounds + num_blocks() + num_clients + 1)

    def sparsity_of(self, server_round: int, rounds: int) -> float:
        """Return the sparsity of each matrix after a round: ``sparsity`` from ``rounds`` on.

        ``linear`` increases it in equal steps. ``cubic`` follows Zhu & Gupta (2017, eq. 1): it
        increases fast at first, while many weights are redundant.
        """
        fraction = min(1.0, server_round / rounds)
        if self.schedule == "linear":
            return self.sparsity * fraction
        if self.schedule == "cubic":
            return self.sparsity * (1 - (1 - fraction) ** 3)
        return self.sparsity


KEPT_EXPONENT = 6
"""Kept weights are clipped to 2^6 as summands; those of language models are far below 10."""
FRACTION_BITS = {"F32": 32, "F64": 32, "F16": 22, "BF16": 19}
"""Bits after the point of a kept weight by the dtype of the model's files.

With 16 bits half a unit is at most the rounding error of the dtype, for all weights from 2^-12 on.
Other dtypes have 24.
"""

BlockIndex = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0)]
"""Round in which a layer of the global model was last pruned; 0 if it is dense."""


class SampledBlocks(Fields):
    """Fields of a request to prune sampled layers (equation 8)."""

    blocks: list[BlockIndex] = Field(min_length=1)
    """Numbers of the sampled layers, ascending."""
    versions: list[Version]
    """Version of every layer of the global model, which the client must have."""


class SampledBlocksPart(PartRequest):
    """Fields of a request for blobs of an earlier reply."""

    blocks: list[BlockIndex] = Field(min_length=1)
    """Numbers of all sampled layers."""


class PruneReport(Report):
    """Fields of a reply with pruned layers."""

    calibration_samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of calibration samples if it is the client's weight in the mean; else 0."""
    damping: float = Field(ge=0)
    """Largest damping that a matrix needed in SparseGPT; 0 if there is no damping."""


class Update(Fields):
    """Fields of a message with layers of the global model that are stale at a client."""

    blocks: list[BlockIndex] = Field(min_length=1)
    """Numbers of the layers, ascending."""
    versions: list[Version]
    """Version of each layer."""
    num_kept: list[Annotated[int, Field(ge=0)]]
    """Number of weights that each matrix keeps, block by block."""


def sparsity_of(run: RunSettings, server_round: int) -> float:
    """Return the sparsity of each matrix after a round."""
    return run.of(FedSpaLLMSettings).sparsity_of(server_round, run.federation.rounds)


def num_kept(block: BlockPlan, run: RunSettings, server_round: int) -> dict[str, int]:
    """Return the number of weights that each matrix keeps in a round, by canonical name."""
    sparsity = sparsity_of(run, server_round)
    group = run.of(FedSpaLLMSettings).local_group
    return {
        linear.name: linear.num_weights - pruned_in_matrix(linear.shape, sparsity, group)
        for linear in block.linears
    }


def sampled_specs(
    plan: ModelPlan, run: RunSettings, server_round: int, blocks: Sequence[int]
) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply with these sampled layers, in layer order."""
    kept = {index: num_kept(plan.blocks[index], run, server_round) for index in blocks}
    return {block_key(index): kept_specs(plan.blocks[index], kept[index]) for index in blocks}


def kept_scale(linear: LinearPlan) -> Scale:
    """Return the fixed point of a matrix's kept weights as summands."""
    return Scale(KEPT_EXPONENT, FRACTION_BITS.get(linear.dtype, 24))


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of votes and, if clients change weights, of kept weights as summands.

    A pruned weight adds zero, so there is a number for every weight of the matrix.
    """
    changes = run.of(FedSpaLLMSettings).changes_weights
    specs = {}
    for block in plan.blocks:
        block_specs = votes_specs(block, run.num_clients)
        for linear in block.linears if changes else ():
            scale = kept_scale(linear)
            # With a sign and room for all clients, so that the sum does not overflow.
            bits = signed_bits(scale.exponent + scale.fraction_bits, run.num_clients)
            block_specs[kept_name(linear.name)] = SumSpec(linear.num_weights, bits)
        specs[block_key(block.index)] = block_specs
    return specs


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    Raises ProtocolError if layers are not ascending or do not exist, or if there is no such part.
    """
    header = request.header
    settings = run.of(FedSpaLLMSettings)
    is_fetch = request.header.kind == "fetch"
    order = (
        validate(SampledBlocksPart, request.fields)
        if is_fetch
        else validate(SampledBlocks, request.fields)
    )
    plan = plan_of()
    _require_blocks(plan, order.blocks)
    specs = sampled_specs(plan, run, header.server_round, order.blocks)
    sparsity = sparsity_of(run, header.server_round)

    def versions_of_all(sampled: SampledBlocks) -> None:
        if len(sampled.versions) != len(plan.blocks):
            raise ProtocolError(
                f"Sample: {len(sampled.versions)} versions for {len(plan.blocks)} layers"
            )

    def numbers_fit(report: PruneReport) -> None:
        require_samples("PruneReport: calibration_samples", report.calibration_samples, run)

    def pruned_exactly(key: str, blob: bytes) -> None:
        block = plan.block(key)
        for name, words in require_kept(block, key, blob).items():
            group = settings.local_group
            require_exact_sparsity(key, block.linear(name), words, sparsity, group)

    reply = Reply(
        order=SampledBlocks,
        part_order=SampledBlocksPart,
        report=PruneReport,
        specs=specs,
        observer=OBSERVER,
        more="Masks and kept weights of further sampled layers, as in train.",
        check_values=pruned_exactly,
        check_order=versions_of_all,
        check_report=numbers_fit,
    )
    return reply.contract(request, run)


def update_specs(plan: ModelPlan, update: Update) -> dict[str, Mapping[str, TensorSpec]]:
    """Return the specs of the blobs of an update."""
    kept = iter(update.num_kept)
    blobs = dict[str, Mapping[str, TensorSpec]]()
    for index in update.blocks:
        block = plan.blocks[index]
        blobs[block_key(index)] = kept_specs(
            block, {linear.name: next(kept) for linear in block.linears}
        )
    return blobs


def push_contract(request: MessageBody, plan_of: PlanOf, settings: RunSettings) -> Contract:
    """Return the contract of a ``push`` with stale layers of the global model.

    Raises ProtocolError if layers are not ascending or do not exist, or if versions or counts do
    not fit them.
    """
    update = validate(Update, request.fields)
    plan = plan_of()
    _require_blocks(plan, update.blocks)
    matrices = [linear for index in update.blocks for linear in plan.blocks[index].linears]
    if len(update.versions) != len(update.blocks) or len(update.num_kept) != len(matrices):
        raise ProtocolError(
            f"Update: {len(update.versions)} versions and {len(update.num_kept)} counts do not fit"
            " the layers"
        )
    if any(
        kept > linear.num_weights for kept, linear in zip(update.num_kept, matrices, strict=True)
    ):
        raise ProtocolError("Update: a matrix keeps more weights than it has")

    def masks_fit(key: str, blob: bytes) -> None:
        require_kept(plan.block(key), key, blob)

    return Contract(
        kind="push",
        method=settings.method,
        down=Side(Update, update_specs(plan, update), masks_fit),
        up=Side(NoFields),
        observer="That layers of the global model arrived, and nothing else.",
    )


def _require_blocks(plan: ModelPlan, blocks: list[int]) -> None:
    if blocks != sorted(set(blocks)) or blocks[-1] >= len(plan.blocks):
        raise ProtocolError(f"message: layers must be ascending and below {len(plan.blocks)}")


OBSERVER = (
    "Of the layers that were sampled for this client: which weights it would prune, and the kept"
    " weights. With SparseGPT their changes depend on the second moments of the client's"
    " activations, which the server influences by the layers that it pushed before. A reader who"
    " knows some of the samples may recognise them. With `client-weights` = `samples` only: the"
    " number of calibration samples. Also the largest damping, and how long the work took."
)
"""Observer sentence of the contract of ``train``."""

EXAMPLES: dict[Kind, dict[str, Any]] = {
    "train": {"blocks": [0, 1], "versions": [0, 0]},
    "fetch": {"blocks": [0, 1]},
    "push": {
        "blocks": [0, 1],
        "versions": [1, 1],
        "num_kept": [2048, 2048, 2048, 2048, 8192, 8192, 8192] * 2,
    },
}
"""Example fields by kind for the model of ``espalier/methods/examples.py`` at 50% sparsity."""


METHOD = Row(
    title=(
        "FedSpaLLM (clients prune sampled layers, the server averages the weights that they keep)"
    ),
    settings=FedSpaLLMSettings,
    strategy="strategies.pruning.fedspallm.strategy:FedSpaLLM",
    job="client_app.methods.pruning.fedspallm",
    summands=summands,
    to_summands="client_app.summands.votes:of_kept",
    push="client_app.methods.pruning.fedspallm_layers:answer_push",
    dry_run="server_app.estimate.messages.pruning:DryFedSpaLLM",
    work="server_app.estimate.work.pruning:KeptWeights",
    outcome="server_app.artifacts.pruned_model:PrunedOutcome",
    baseline="strategies.baselines:reconstructed_by_all",
)
