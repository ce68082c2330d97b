"""Messages of methods whose server decides masks, in one round or block by block.

With iterative pruning, each round decides one block, and the next one begins behind it. A client
that lost its hidden states gets all earlier decisions again.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.contract import Contract
from espalier.messages.message import Fields, MessageBody, validate
from espalier.messages.parts import Push, last_rounds, require_result_wanted
from espalier.messages.tensor_blobs import TensorSpec
from espalier.models.plan import BlockPlan, ModelPlan, PlanOf, cut_into_parts
from espalier.settings.pruning import MaskingSettings
from espalier.settings.run import RunSettings

DecidedSpecs = Callable[[BlockPlan, RunSettings], Mapping[str, Mapping[str, TensorSpec]]]
"""Function that returns the specs of a decided block's blobs, by key."""


class Decided(Fields):
    """Fields of a message with decided blocks.

    With these a client applies the federated result to its own base model.
    """

    decided: int = Field(ge=1)
    """Number of decided blocks in all parts together."""


def blocks_of_round(plan: ModelPlan, settings: MaskingSettings, server_round: int) -> range:
    """Return the numbers of the blocks that a round decides.

    One-shot pruning decides all blocks in its only round, iterative pruning one block per round
    (FedPrLLM, section 3.2.3). ``require_round`` has refused other rounds.
    """
    if settings.strategy == "one-shot":
        return range(len(plan.blocks))
    return range(server_round - 1, server_round)


def parts_of_decided(
    plan: ModelPlan, settings: RunSettings, decided: int, specs_of: DecidedSpecs
) -> list[range]:
    """Return the block numbers of each part in which the first ``decided`` blocks are pushed."""
    specs = [
        [spec for blob in specs_of(block, settings).values() for spec in blob.values()]
        for block in plan.blocks[:decided]
    ]
    return cut_into_parts(
        [sum(spec.num_bytes for spec in block) for block in specs], settings.part_bytes
    )


def push_of_blocks(
    request: MessageBody,
    plan_of: PlanOf,
    settings: RunSettings,
    order: type[Decided],
    specs_of: DecidedSpecs,
    check_order: Callable[[Any, int], None] = lambda *_: None,
) -> Contract:
    """Return the contract of a ``push`` with a part of the federated result.

    In iterative pruning it may also push all decisions before a round, to a client that lost its
    hidden states. ``check_order`` checks the fields of a part with this number of blocks. Raises
    ProtocolError if the blocks are neither the result nor the decisions before the round, or if the
    run pushes no result.
    """
    header = request.header
    decided = validate(order, request.fields).decided
    plan = plan_of()
    is_result = decided == len(plan.blocks)
    job = settings.of(MaskingSettings)
    if is_result:
        require_result_wanted(settings)
    # All blocks are decided only at the end of the last round.
    if is_result and header.server_round != last_rounds(plan_of, settings)[0]:
        raise ProtocolError(
            f"message: the result is pushed in round {header.server_round}, before it is decided"
        )
    # Decisions before the round go to a client that lost its hidden states.
    if not is_result and (job.strategy != "iterative" or decided != header.server_round - 1):
        raise ProtocolError(
            f"message: {decided} decided blocks are pushed, which is neither all nor those"
            " before the round"
        )
    blobs = [specs_of(block, settings) for block in plan.blocks[:decided]]
    parts = parts_of_decided(plan, settings, decided, specs_of)
    push = Push(
        order=order,
        specs={key: specs for block in blobs for key, specs in block.items()},
        parts=[[key for index in part for key in blobs[index]] for part in parts],
        observer=(
            "That the federated result arrived, and nothing else. It is sent with"
            " `evaluation.own-text`, and in iterative pruning to a client that lost its hidden"
            " states."
        ),
        # Each part has its own number of blocks.
        check_order=lambda order: check_order(order, len(parts[header.part])),
    )
    return push.contract(request, settings)
