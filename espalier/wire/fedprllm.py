"""Contracts of FedPrLLM: a packed prune mask per matrix, nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

from numpy.typing import NDArray
from pydantic import Field

from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.mistakes import Mistake
from espalier.wire.contract import Contract, Side
from espalier.wire.masks import mask_name
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.parts import PartRequest, Sha256
from espalier.wire.payload import TensorSpec, block_key
from espalier.wire.plan import BlockPlan, ModelPlan, cut_into_parts
from pruning_kernels.bitmask import count, count_rows, has_clean_padding, num_words
from pruning_kernels.selection import pruned_in_matrix, pruned_per_group


class VoteReport(Scalars):
    """What a client reports beside its masks."""

    seconds: float = Field(ge=0)
    calibration_tokens: int = Field(ge=1)
    calibration_sha256: Sha256
    blob_sha256: list[Sha256]
    """Hash of every block's blob, in order of blocks, so that later parts can be asked for by hash."""


def mask_specs(block: BlockPlan) -> dict[str, TensorSpec]:
    """The tensors of one block's blob: one flat packed mask per matrix."""
    return {mask_name(linear.name): TensorSpec("U64", (num_words(linear.num_weights),)) for linear in block.linears}


def block_parts(plan: ModelPlan, part_bytes: int) -> list[range]:
    """Which blocks travel in which part of a reply."""
    sizes = [sum(spec.num_bytes for spec in mask_specs(block).values()) for block in plan.blocks]
    return cut_into_parts(sizes, part_bytes)


@dataclass(frozen=True)
class ExactSparsity:
    """Checks that every mask prunes exactly the number of weights that the settings ask for."""

    plan: ModelPlan
    settings: FedPrLLMSettings

    def __call__(self, key: str, tensors: Mapping[str, NDArray]) -> None:
        """Raise Mistake if a mask of the block prunes too many or too few weights, or has bits beyond its weights."""
        block = next(block for block in self.plan.blocks if block_key(block.index) == key)
        for linear in block.linears:
            words = tensors[mask_name(linear.name)]
            expected = pruned_in_matrix(linear.shape, self.settings.sparsity, self.settings.local_comparison_group)
            if not has_clean_padding(words, linear.num_weights):
                raise Mistake(f"{key} {linear.name}: bits are set beyond the last weight")
            if (pruned := count(words)) != expected:
                raise Mistake(f"{key} {linear.name}: prunes {pruned} weights, the settings ask for {expected}")
            per_row = pruned_per_group(linear.shape, self.settings.sparsity, "row")
            if self.settings.local_comparison_group == "row" and (count_rows(words, linear.shape) != per_row).any():
                raise Mistake(f"{key} {linear.name}: a row does not prune exactly {per_row} weights")


def contract(kind: str, plan: ModelPlan, settings: FedPrLLMSettings, part: int, part_bytes: int) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    parts = block_parts(plan, part_bytes)
    masks = {block_key(index): mask_specs(plan.blocks[index]) for index in parts[part]}
    exact = ExactSparsity(plan, settings)
    fetched = kind == "fetch"

    def a_hash_per_block(report: Scalars) -> None:
        if isinstance(report, VoteReport) and len(report.blob_sha256) != len(plan.blocks):
            raise Mistake(f"VoteReport: {len(report.blob_sha256)} hashes for {len(plan.blocks)} blocks")

    return Contract(
        kind=kind,
        method="fedprllm",
        num_parts=len(parts),
        down=Side(PartRequest if fetched else NoScalars),
        up=Side(NoScalars if fetched else VoteReport, masks, exact, None if fetched else a_hash_per_block),
        observer=(
            "for every weight one bit: whether this client would prune it, given its text; the number and a hash of its "
            "calibration tokens (who guesses all of them can confirm the guess); and how long it took"
            if kind == "train"
            else "the masks of further blocks, as in train"
        ),
    )
