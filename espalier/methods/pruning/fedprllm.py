"""FedPrLLM: settings and contracts. Clients send one packed prune mask per matrix as their vote."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from espalier.errors import ProtocolError
from espalier.messages.blobs.masks import (
    mask_name,
    mask_specs,
    require_exact_sparsity,
    votes_specs,
)
from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.decided_blocks import (
    Decided,
    blocks_of_round,
    parts_of_decided,
    push_of_blocks,
)
from espalier.messages.message import Fields, Kind, MessageBody, NoFields
from espalier.messages.parts import Reply
from espalier.messages.sums.summands import SumSpecs
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.models.plan import BlockPlan, ModelPlan, PlanOf, block_key
from espalier.settings.pruning import MASKS_HAVE_NO_NOISE, Group, MaskingSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith


class FedPrLLMSettings(MaskingSettings):
    """Table ``[fedprllm]``, with the terms of the paper (section 3.2)."""

    FEDERATION: ClassVar[tuple[str, ...]] = ("aggregation-rule", "trimmed-clients", "secure-sum")
    RULES: ClassVar[tuple[str, ...]] = ("mean", "trimmed-mean", "median")
    WHY_NO_OTHER_RULE = "a vote is 0 or 1, so there is nothing to clip"
    NO_MECHANISM = MASKS_HAVE_NO_NOISE
    READ_WITH: ClassVar[ReadWith] = {"vote-group": {"pruning.pattern": ("",)}}

    vote_group: Group = Field(
        "layer", description="Group in which weights compete for the summed votes."
    )
    ties: Literal["magnitude", "index", "random"] = Field(
        "magnitude",
        description=(
            "Order in which weights with equally many votes are pruned: smaller magnitude first,"
            " lower index first, or a seeded random order."
        ),
    )
    weight_scaling: bool = Field(
        False, description="Shrink each kept weight by the fraction of clients that would prune it."
    )
    continue_behind: Literal["masked", "scaled"] = Field(
        "masked",
        description=(
            "Block from which clients of iterative pruning continue: the masked one, as in step 7"
            " of the paper, or with weight scaling the scaled one, as in its published code (the"
            " server then sends one more byte per weight)."
        ),
    )

    @model_validator(mode="after")
    def _scaled_blocks_are_there(self) -> "FedPrLLMSettings":
        if self.continue_behind == "scaled" and not (
            self.weight_scaling and self.strategy == "iterative"
        ):
            raise ValueError(
                "continue-behind = 'scaled': needs pruning.strategy = 'iterative' and"
                " weight-scaling = true"
            )
        return self

    @property
    def depends_on_text(self) -> bool:
        """True if the tensors that a client sends depend on its text."""
        return self.metric != "magnitude"

    @property
    def server_group(self) -> str:
        """Group in which weights compete for the votes: the pattern or ``vote-group``."""
        return self.pattern or self.vote_group


def mask_blobs(
    plan: ModelPlan, settings: FedPrLLMSettings, server_round: int
) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a round's reply, in block order."""
    return {
        block_key(index): mask_specs(plan.blocks[index])
        for index in blocks_of_round(plan, settings, server_round)
    }


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of a round's votes as summands, in block order."""
    return {
        block_key(index): votes_specs(plan.blocks[index], run.num_clients)
        for index in blocks_of_round(plan, run.of(FedPrLLMSettings), server_round)
    }


class Decision(Decided):
    """Fields of a message with decided masks and votes."""

    num_voters: list[Annotated[int, Field(ge=1)]]
    """Number of clients that voted on each block of the part, in block order."""


VOTES = "votes-"
"""Beginning of ``votes_key``."""


def votes_key(index: int) -> str:
    """Return the key of the blob with the votes per weight of a block; weight scaling needs it."""
    return f"{VOTES}{index:04d}"


def votes_dtype(num_clients: int) -> np.dtype:
    """Return the smallest unsigned dtype that holds the votes of ``num_clients`` clients."""
    return np.min_scalar_type(num_clients)


def decided_specs(block: BlockPlan, settings: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of a decided block's blobs: masks and, with weight scaling, votes."""
    blobs = {block_key(block.index): mask_specs(block)}
    if settings.of(FedPrLLMSettings).weight_scaling:
        dtype = f"U{8 * votes_dtype(settings.num_clients).itemsize}"
        blobs[votes_key(block.index)] = {
            linear.name: TensorSpec(dtype, linear.shape) for linear in block.linears
        }
    return blobs


def decided_parts(plan: ModelPlan, settings: RunSettings, decided: int) -> list[range]:
    """Return the block numbers of each part in which the first ``decided`` blocks are pushed."""
    return parts_of_decided(plan, settings, decided, decided_specs)


def push_contract(request: MessageBody, plan_of: PlanOf, settings: RunSettings) -> Contract:
    """Return the contract of a ``push`` message (``decided_blocks.push_of_blocks``)."""

    def a_number_per_block(decision: Decision, num_blocks: int) -> None:
        if len(decision.num_voters) != num_blocks:
            raise ProtocolError(
                f"Decision: {len(decision.num_voters)} numbers of voters for {num_blocks} blocks"
            )

    return push_of_blocks(request, plan_of, settings, Decision, decided_specs, a_number_per_block)


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    In iterative pruning ``train`` brings the decided masks of the block before, so that the client
    continues with the server's decision (step 7). With ``continue-behind = "scaled"`` it also
    brings the votes and the number of voters.
    """
    settings = run.of(FedPrLLMSettings)
    server_round = request.header.server_round
    plan = plan_of()
    specs = mask_blobs(plan, settings, server_round)
    request_blobs: BlockSpecs = {}
    order: type[Fields] = NoFields
    if settings.strategy == "iterative" and server_round > 1:
        previous_block = plan.blocks[server_round - 2]
        request_blobs = {block_key(previous_block.index): mask_specs(previous_block)}
        if settings.continue_behind == "scaled":
            request_blobs = decided_specs(previous_block, run)
            order = Decision

    def exactly_sparse(key: str, blob: bytes) -> None:
        masks = views(blob)
        for linear in plan.block(key).linears:
            words = masks[mask_name(linear.name)]
            require_exact_sparsity(key, linear, words, settings.sparsity, settings.local_group)

    def a_number_of_voters(decision: Decision) -> None:
        if len(decision.num_voters) != 1:
            raise ProtocolError(
                f"Decision: {len(decision.num_voters)} numbers of voters for 1 block"
            )

    reply = Reply(
        order=order,
        specs=specs,
        observer=OBSERVER,
        more="The masks of further blocks, as in train.",
        request_blobs=request_blobs,
        check_values=exactly_sparse,
        check_order=a_number_of_voters if order is Decision else None,
    )
    return reply.contract(request, run)


OBSERVER = (
    "One bit per weight: whether this client would prune it, given its text. A reader who knows"
    " some of the samples can recognise them in the reply, whatever `min-tokens` says. Also how"
    " long the work took."
)

EXAMPLES: dict[Kind, dict[str, Any]] = {"push": {"num_voters": [1], "decided": 2}}
"""Example fields by kind for a model of two blocks; the contract of the kind depends on them."""


METHOD = Row(
    title="FedPrLLM (clients vote with their masks on the weights to prune)",
    settings=FedPrLLMSettings,
    strategy="strategies.pruning.fedprllm:FedPrLLM",
    job="client_app.methods.pruning.fedprllm",
    summands=summands,
    to_summands="client_app.summands.votes:of_masks",
    dry_run="server_app.estimate.messages.pruning:DryFedPrLLM",
    work="server_app.estimate.work.pruning:Masking",
    outcome="server_app.artifacts.pruned_model:PrunedOutcome",
    baseline="strategies.baselines:masked_by_all",
)
