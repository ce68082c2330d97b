"""Contracts of FedPrLLM: a packed prune mask per matrix, nothing else."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import Contract, Side
from espalier.wire.masks import mask_name, require_exact_sparsity
from espalier.wire.messages import MOST_SECONDS, Letter, NoScalars, Scalars, validate
from espalier.wire.parts import PartRequest, Sha256, hashes_of_part
from espalier.wire.payload import TensorSpec, block_key, views
from espalier.wire.plan import BlockPlan, ModelPlan, cut_into_parts
from espalier.wire.rounds_of_run import last_rounds
from pruning_kernels.bitmask import num_words


class VoteReport(Scalars):
    """What a client reports beside its masks."""

    seconds: float = Field(ge=0, le=MOST_SECONDS)
    blob_sha256: list[Sha256]
    """Hash of every block's blob, in order of blocks, so that later parts can be asked for by hash."""


def mask_specs(block: BlockPlan) -> dict[str, TensorSpec]:
    """The tensors of one block's blob: one flat packed mask per matrix."""
    return {mask_name(linear.name): TensorSpec("U64", (num_words(linear.num_weights),)) for linear in block.linears}


def blocks_of_round(plan: ModelPlan, settings: FedPrLLMSettings, server_round: int) -> range:
    """Which blocks a round decides: all of them, or the round's own when pruning is iterative (section 3.2.3)."""
    if settings.strategy == "one-shot":
        return range(len(plan.blocks))
    if not 1 <= server_round <= len(plan.blocks):
        raise Mistake(f"message: round {server_round} does not exist, iterative pruning has one per block: {len(plan.blocks)}")
    return range(server_round - 1, server_round)


def block_parts(plan: ModelPlan, settings: FedPrLLMSettings, server_round: int, part_bytes: int) -> list[range]:
    """Which blocks travel in which part of a round's reply."""
    blocks = blocks_of_round(plan, settings, server_round)
    sizes = [sum(spec.num_bytes for spec in mask_specs(plan.blocks[index]).values()) for index in blocks]
    return [range(blocks[part.start], blocks[part.stop - 1] + 1) for part in cut_into_parts(sizes, part_bytes)]


class Decision(Scalars):
    """What a client needs, beside masks and votes, to make the federated model of its own base model."""

    num_voters: list[Annotated[int, Field(ge=1)]]
    """How many clients voted on each block of the part, in order of blocks."""
    decided: int = Field(ge=1)
    """How many blocks are decided, and brought by all parts together."""


def votes_key(index: int) -> str:
    """Name of the blob with a decided block's votes per weight; it travels where weights are scaled by them."""
    return f"votes-{index:04d}"


def votes_dtype(num_clients: int) -> np.dtype:
    """The smallest unsigned dtype for the votes of so many clients."""
    return np.min_scalar_type(num_clients)


def decided_specs(block: BlockPlan, settings: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """The blobs that describe a decided block: its masks and, with weight scaling, its votes."""
    blobs = {block_key(block.index): mask_specs(block)}
    if settings.fedprllm.weight_scaling:
        dtype = f"U{8 * votes_dtype(settings.num_clients).itemsize}"
        blobs[votes_key(block.index)] = {linear.name: TensorSpec(dtype, linear.shape) for linear in block.linears}
    return blobs


def decided_parts(plan: ModelPlan, settings: RunSettings, decided: int) -> list[range]:
    """Which of the first ``decided`` blocks travel to the clients in which part."""
    blocks = plan.blocks[:decided]
    specs = [[spec for blob in decided_specs(block, settings).values() for spec in blob.values()] for block in blocks]
    return cut_into_parts([sum(spec.num_bytes for spec in block) for block in specs], settings.part_bytes)


def delivery(request: Letter, plan: ModelPlan, settings: RunSettings) -> Contract:
    """The contract of a ``deliver`` message: a part of the federated result on its way to a client.

    In iterative pruning it may be what was decided before a round, for a client that lost its hidden states.
    """
    header, decided = request.header, validate(Decision, request.scalars).decided
    whole = decided == len(plan.blocks)
    if whole and not settings.evaluation.own_text:
        raise Mistake("message: a result is delivered, but evaluation.own-text is off")
    if whole and header.server_round != last_rounds(plan, settings)[0]:
        raise Mistake(f"message: the result is delivered in round {header.server_round}, before it is decided")
    if not whole and (settings.fedprllm.strategy != "iterative" or decided != header.server_round - 1):
        raise Mistake(f"message: {decided} decided blocks are delivered, which is neither all nor those before the round")
    parts = decided_parts(plan, settings, decided)
    if header.part >= len(parts):
        raise Mistake(f"message: part {header.part} of a deliver does not exist, the result has {len(parts)}")
    blocks = [plan.blocks[index] for index in parts[header.part]]

    def a_number_per_block(decision: Scalars) -> None:
        if isinstance(decision, Decision) and len(decision.num_voters) != len(blocks):
            raise Mistake(f"Decision: {len(decision.num_voters)} numbers of voters for {len(blocks)} blocks")

    blobs = {key: specs for block in blocks for key, specs in decided_specs(block, settings).items()}
    return Contract(
        kind="deliver",
        method="fedprllm",
        down=Side(Decision, blobs, check_scalars=a_number_per_block),
        up=Side(NoScalars),
        observer="that the federated result arrived, nothing else; it is sent with `evaluation.own-text`, and in iterative "
        "pruning to a client that lost its hidden states",
    )


@dataclass(frozen=True)
class ExactSparsity:
    """Checks that every comparison group of a mask prunes exactly the number of weights that the settings ask for."""

    plan: ModelPlan
    settings: FedPrLLMSettings

    def __call__(self, key: str, blob: bytes) -> None:
        """Raise Mistake if the masks of a block prune too many or too few weights, or have bits beyond their weights."""
        block = next(block for block in self.plan.blocks if block_key(block.index) == key)
        masks = views(blob)
        for linear in block.linears:
            words = masks[mask_name(linear.name)]
            require_exact_sparsity(key, linear, words, self.settings.sparsity, self.settings.local_group)


def contract(request: Letter, plan: ModelPlan, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part.

    In iterative pruning ``train`` brings the decided masks of the block before, so that the client goes on with what the
    server pruned (step 7), and with ``continue-behind = "scaled"`` its votes and the number of voters.
    """
    header, settings, part_bytes = request.header, run.fedprllm, run.part_bytes
    fetched = header.kind == "fetch"
    parts = block_parts(plan, settings, header.server_round, part_bytes)
    if header.part >= len(parts) or (header.part > 0 and not fetched):
        raise Mistake(f"message: part {header.part} of a {header.kind} does not exist, a reply has {len(parts)}")
    masks = {block_key(index): mask_specs(plan.blocks[index]) for index in parts[header.part]}
    blocks = blocks_of_round(plan, settings, header.server_round)
    decided: dict[str, dict[str, TensorSpec]] = {}
    told: type[Scalars] = PartRequest if fetched else NoScalars
    if settings.strategy == "iterative" and header.server_round > 1 and not fetched:
        before = plan.blocks[header.server_round - 2]
        decided = {block_key(before.index): mask_specs(before)}
        if settings.continue_behind == "scaled":
            decided, told = decided_specs(before, run), Decision

    def a_hash_per_block(report: Scalars) -> None:
        if isinstance(report, VoteReport) and len(report.blob_sha256) != len(blocks):
            raise Mistake(f"VoteReport: {len(report.blob_sha256)} hashes for {len(blocks)} blocks")

    def a_number_of_voters(decision: Scalars) -> None:
        if isinstance(decision, Decision) and len(decision.num_voters) != 1:
            raise Mistake(f"Decision: {len(decision.num_voters)} numbers of voters for 1 block")

    return Contract(
        kind=header.kind,
        method="fedprllm",
        num_parts=len(parts),
        down=Side(told, decided, check_scalars=a_number_of_voters),
        up=Side(
            NoScalars if fetched else VoteReport,
            masks,
            ExactSparsity(plan, settings),
            None if fetched else a_hash_per_block,
            hashes_of_part(request, map(block_key, blocks), masks),
        ),
        observer="the masks of further blocks, as in train" if fetched else OBSERVER,
    )


OBSERVER = (
    "for every weight one bit: whether this client would prune it, given its text (who guesses the text of all its windows can "
    "confirm the guess; the site's `least-tokens` says how much that is at least); and how long it took"
)
