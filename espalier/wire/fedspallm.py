"""Contracts of FedSpaLLM: masks and kept weights of the layers that a client sampled, nothing else."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from espalier.settings.fedspallm import FedSpaLLMSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import Contract, Side
from espalier.wire.kept import kept_specs, require_kept
from espalier.wire.masks import require_exact_sparsity
from espalier.wire.messages import MOST_SECONDS, Letter, NoScalars, Scalars, validate
from espalier.wire.parts import Sha256, hashes_of_part
from espalier.wire.payload import TensorSpec, block_key
from espalier.wire.plan import BlockPlan, ModelPlan, cut_into_parts
from pruning_kernels.comparison_groups import pruned_in_matrix

BlockIndex = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0)]
"""The round in which a layer of the global model was last pruned; 0: it is dense."""


MOST_WINDOWS = 1_000_000
"""Calibration windows that a client may report; with ``client-weights = "samples"`` they are its weight."""


class Sample(Scalars):
    """What a client is asked to prune (equation 8)."""

    blocks: list[BlockIndex] = Field(min_length=1)
    """The sampled layers, ascending."""
    versions: list[Version]
    """Version of every layer of the global model, which the client must hold."""


class SamplePart(Scalars):
    """Which blobs of an earlier reply the server asks for."""

    blocks: list[BlockIndex] = Field(min_length=1)
    """All layers of the sample."""
    blob_sha256: list[Sha256] = Field(min_length=1)
    """Hashes of the part's blobs, in order of layers."""


class PruneReport(Scalars):
    """What a client reports beside its pruned layers."""

    seconds: float = Field(ge=0, le=MOST_SECONDS)
    calibration_windows: int = Field(ge=0, le=MOST_WINDOWS)
    """How many windows it has, where they are its weight in the mean; else 0, which tells nothing."""
    damping: float = Field(ge=0)
    """The largest damping that a matrix needed (SparseGPT); 0 where none is used."""
    blob_sha256: list[Sha256]
    """Hash of every sampled layer's blob, so that later parts can be asked for by hash."""


class Update(Scalars):
    """Layers of the global model that are stale at a client."""

    blocks: list[BlockIndex] = Field(min_length=1)
    versions: list[Version]
    num_kept: list[Annotated[int, Field(ge=0)]]
    """Weights that each matrix keeps, block after block."""


def num_kept(block: BlockPlan, settings: FedSpaLLMSettings, server_round: int) -> dict[str, int]:
    """How many weights of each matrix a client keeps in a round, by canonical linear name."""
    sparsity, group = settings.sparsity_of(server_round), settings.local_group
    return {linear.name: linear.num_weights - pruned_in_matrix(linear.shape, sparsity, group) for linear in block.linears}


def sample_specs(plan: ModelPlan, settings: FedSpaLLMSettings, server_round: int, index: int) -> dict[str, TensorSpec]:
    """The tensors of one sampled layer's blob."""
    block = plan.blocks[index]
    return kept_specs(block, num_kept(block, settings, server_round))


def sample_parts(plan: ModelPlan, run: RunSettings, server_round: int, blocks: list[int]) -> list[list[int]]:
    """Which of the sampled layers travel in which part of a reply."""
    specs = [sample_specs(plan, run.fedspallm, server_round, index).values() for index in blocks]
    parts = cut_into_parts([sum(spec.num_bytes for spec in block) for block in specs], run.part_bytes)
    return [[blocks[place] for place in part] for part in parts]


def contract(request: Letter, plan: ModelPlan, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    header, settings = request.header, run.fedspallm
    fetched = header.kind == "fetch"
    blocks = (
        validate(SamplePart, request.scalars).blocks if fetched else validate(Sample, request.scalars).blocks
    )  # both are checked once more as part of the contract
    _require_blocks(plan, blocks)
    parts = sample_parts(plan, run, header.server_round, blocks)
    if header.part >= len(parts) or (header.part > 0) != fetched:
        raise Mistake(f"message: part {header.part} of a {header.kind} does not exist, a reply has {len(parts)}")
    blobs = {block_key(index): sample_specs(plan, settings, header.server_round, index) for index in parts[header.part]}

    def versions_of_all(sample: Scalars) -> None:
        if isinstance(sample, Sample) and len(sample.versions) != len(plan.blocks):
            raise Mistake(f"Sample: {len(sample.versions)} versions for {len(plan.blocks)} layers")

    def numbers_fit(report: Scalars) -> None:
        if not isinstance(report, PruneReport):
            return
        if len(report.blob_sha256) != len(blocks):
            raise Mistake(f"PruneReport: {len(report.blob_sha256)} hashes for {len(blocks)} layers")
        if (report.calibration_windows > 0) != (settings.client_weights == "samples"):
            raise Mistake("PruneReport: calibration_windows are told with fedspallm.client-weights = 'samples' alone")

    def pruned_exactly(key: str, blob: bytes) -> None:
        block = next(block for block in plan.blocks if block_key(block.index) == key)
        for name, words in require_kept(block, key, blob).items():
            linear = next(linear for linear in block.linears if linear.name == name)
            require_exact_sparsity(key, linear, words, settings.sparsity_of(header.server_round), settings.local_group)

    return Contract(
        kind=header.kind,
        method="fedspallm",
        num_parts=len(parts),
        down=Side(SamplePart if fetched else Sample, check_scalars=versions_of_all),
        up=Side(
            NoScalars if fetched else PruneReport,
            blobs,
            pruned_exactly,
            numbers_fit,
            hashes_of_part(request, map(block_key, blocks), blobs),
        ),
        observer="masks and kept weights of further sampled layers, as in train" if fetched else OBSERVER,
    )


def update_specs(plan: ModelPlan, update: Update) -> dict[str, Mapping[str, TensorSpec]]:
    """The blobs that bring an update."""
    kept, blobs = iter(update.num_kept), dict[str, Mapping[str, TensorSpec]]()
    for index in update.blocks:
        block = plan.blocks[index]
        blobs[block_key(index)] = kept_specs(block, {linear.name: next(kept) for linear in block.linears})
    return blobs


def delivery(request: Letter, plan: ModelPlan, settings: RunSettings) -> Contract:
    """The contract of a ``deliver`` message: layers of the global model that are stale at a client."""
    update = validate(Update, request.scalars)
    _require_blocks(plan, update.blocks)
    matrices = [linear for index in update.blocks for linear in plan.blocks[index].linears]
    if len(update.versions) != len(update.blocks) or len(update.num_kept) != len(matrices):
        raise Mistake(f"Update: {len(update.versions)} versions and {len(update.num_kept)} counts do not fit the layers")
    if any(kept > linear.num_weights for kept, linear in zip(update.num_kept, matrices, strict=True)):
        raise Mistake("Update: a matrix keeps more weights than it has")

    def masks_fit(key: str, blob: bytes) -> None:
        require_kept(next(block for block in plan.blocks if block_key(block.index) == key), key, blob)

    return Contract(
        kind="deliver",
        method="fedspallm",
        down=Side(Update, update_specs(plan, update), masks_fit),
        up=Side(NoScalars),
        observer="that layers of the global model arrived, nothing else",
    )


def _require_blocks(plan: ModelPlan, blocks: list[int]) -> None:
    if blocks != sorted(set(blocks)) or blocks[-1] >= len(plan.blocks):
        raise Mistake(f"message: layers must be ascending and below {len(plan.blocks)}")


OBSERVER = (
    "of the layers that were sampled for it: which weights this client would prune, and the kept weights, whose changes (with "
    "SparseGPT) depend on the second moments of its activations (of activations that the server chooses in part, by the layers "
    "that it delivered before; who guesses the text of all its windows can confirm the guess); with `client-weights` = "
    "`samples` alone, how many windows it has; the largest damping; and how long it took"
)
"""What the contract of ``train`` says of an observer."""
