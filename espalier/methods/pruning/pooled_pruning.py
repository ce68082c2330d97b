"""Pooled pruning: settings and contracts.

Clients send, for each input of a block's matrices, the sum of squares per channel in fixed point,
and a count. The tensors of several clients are added modulo 2^64, and nothing else happens to them
before the server decides.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.masks import mask_specs
from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.decided_blocks import (
    Decided,
    blocks_of_round,
    parts_of_decided,
    push_of_blocks,
)
from espalier.messages.message import Kind, MessageBody
from espalier.messages.parts import MAX_SAMPLES, Reply
from espalier.messages.sums.summands import WIDE_BITS, WORD_BITS, SumSpec, SumSpecs
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.models.plan import BlockPlan, ModelPlan, PlanOf, block_key
from espalier.models.structure import COLUMNS
from espalier.settings.pruning import MaskingSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import FederationSettings, largest_trim
from espalier.settings.tables.lora import LoraSettings
from pruning_kernels.fixed_point import RECORD_BITS, is_possible

FRACTION_BITS = {"tokens": 56, "equal": 64}
"""Bits after the point of the sent numbers, by ``weighting``.

They are public constants. Sums of squares stay below 2^39: a client with 262,144 tokens may have
inputs whose root mean square is 1,448 in a channel. Means of squares stay below 2^31, a root mean
square of 46,340. Smaller numbers than 2^-4 and 2^-12 are rounded, others are exact float64.
"""
COUNT = "count"
"""Tensor name of the count: number of tokens, or 1 in a private run or if clients count equally."""


class PooledPruningSettings(MaskingSettings):
    """Table ``[pooled-pruning]``."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "max-weight-ratio", "aggregation-rule", "trimmed-clients", "max-update-ratio",
        "secure-sum",
    )  # fmt: skip
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples",)
    """Clients count by their tokens, or equally by ``weighting``."""
    RULES: ClassVar[tuple[str, ...]] = ("mean", "clipped-mean", "trimmed-mean", "median")
    MECHANISM = "sums"

    metric: Literal["wanda", "ria"] = "wanda"
    weighting: Literal["tokens", "equal"] = Field(
        "tokens",
        description=(
            "`tokens`: every token counts equally, as if all text were in one place; `equal`: every"
            " client counts equally, because it divides its sums by its number of tokens."
        ),
    )

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return an error line for limits where there are too few clients to have a median."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if federation.clips and largest_trim(num_clients) < 1:
            lines.append(
                "federation.aggregation-rule = 'clipped-mean': has no effect with num-clients ="
                f" {num_clients}; it needs three clients; set it to 'mean'"
            )
        return lines

    @property
    def fraction_bits(self) -> int:
        """Bits after the point of the sent numbers, unless the run is private."""
        return FRACTION_BITS[self.weighting]


def fraction_bits(run: RunSettings) -> int:
    """Return the bits after the point of the sent numbers."""
    return RECORD_BITS if run.privacy.on else run.of(PooledPruningSettings).fraction_bits


def num_inputs(plan: ModelPlan) -> int:
    """Return the number of distinct inputs of all blocks, each of which has a vector of sums."""
    return sum(len(set(shared_inputs(block).values())) for block in plan.blocks)


def shared_inputs(block: BlockPlan) -> dict[str, str]:
    """Return, for each matrix of a block, the first matrix that has the same input.

    Query, key and value share one input, gate and up another.
    """
    first: dict[str, str] = {}
    for linear in block.linears:
        first.setdefault(COLUMNS[linear.name], linear.name)
    return {linear.name: first[COLUMNS[linear.name]] for linear in block.linears}


def squares_name(linear: str) -> str:
    """Return the tensor name of the sums of squares of an input, by its first matrix."""
    return f"{linear}.squares"


def sum_specs(block: BlockPlan) -> dict[str, TensorSpec]:
    """Return the specs of a block's blob of sums.

    It has two words for each channel of each distinct input, and the count.
    """
    widths = {name: block.linear(name).shape[1] for name in shared_inputs(block).values()}
    specs = {squares_name(name): TensorSpec("U64", (2, width)) for name, width in widths.items()}
    return specs | {COUNT: TensorSpec("U64", (1,))}


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of a round's summands: the sums of squares in 128 bits, and the count."""
    blocks = blocks_of_round(plan, run.of(PooledPruningSettings), server_round)
    return {
        block_key(index): {
            name: SumSpec(1, WORD_BITS) if name == COUNT else SumSpec(spec.shape[1], WIDE_BITS)
            for name, spec in sum_specs(plan.blocks[index]).items()
        }
        for index in blocks
    }


def require_possible(key: str, blob: bytes, max_count: int, signed: bool = False) -> None:
    """Check that sums can be one client's: bits, sign, range, and the count.

    Noise makes sums ``signed``. Raises ProtocolError if a number is negative, or beyond what one
    client may send.
    """
    for name, words in views(blob).items():
        if name == COUNT:
            if not 1 <= (count := int(words[0])) <= max_count:
                raise ProtocolError(f"{key} {name}: {count} is not between 1 and {max_count}")
        elif not is_possible(words, signed=signed):
            raise ProtocolError(f"{key} {name}: a number is negative, or too large for one client")


def decided_specs(block: BlockPlan, run: RunSettings) -> Mapping[str, Mapping[str, TensorSpec]]:
    """Return the specs of a decided block's blob: its masks."""
    return {block_key(block.index): mask_specs(block)}


def decided_parts(plan: ModelPlan, run: RunSettings, decided: int) -> list[range]:
    """Return the block numbers of each part in which the first ``decided`` blocks are pushed."""
    return parts_of_decided(plan, run, decided, decided_specs)


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` message (``decided_blocks.push_of_blocks``)."""
    return push_of_blocks(request, plan_of, run, Decided, decided_specs)


def max_count(run: RunSettings) -> int:
    """Return the maximum count of one client: tokens, or 1 if clients count equally."""
    counts_tokens = run.of(PooledPruningSettings).weighting == "tokens" and not run.privacy.on
    return MAX_SAMPLES * run.data.sequence_length if counts_tokens else 1


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part.

    In iterative pruning ``train`` brings the decided masks of the block before.
    """
    settings = run.of(PooledPruningSettings)
    server_round = request.header.server_round
    plan = plan_of()
    request_blobs: BlockSpecs = {}
    if settings.strategy == "iterative" and server_round > 1:
        request_blobs = decided_specs(plan.blocks[server_round - 2], run)
    private = run.privacy.on
    reply = Reply(
        specs={
            block_key(index): sum_specs(plan.blocks[index])
            for index in blocks_of_round(plan, settings, server_round)
        },
        observer=PRIVATE_OBSERVER if private else OBSERVER,
        more="The sums of further blocks, as in train.",
        request_blobs=request_blobs,
        check_values=partial(require_possible, max_count=max_count(run), signed=private),
    )
    return reply.contract(request, run)


OBSERVER = (
    "For every input channel of the blocks' matrices: the sum of its squares over this client's"
    ' samples, and the number of tokens, or with `weighting = "equal"` the mean of the squares'
    " without a number. The inputs of the first block's attention depend on one token each, so"
    " somebody can compute from their sums how often each token occurs. Over few tokens the means"
    " come close to the squares of single tokens; the site's `min-tokens` sets the minimum. A"
    " reader who knows some of the samples can recognise them in the reply, whatever `min-tokens`"
    " says. Also how long the work took."
)

PRIVATE_OBSERVER = (
    "For every input channel of the blocks' matrices: a sum over this client's records or groups,"
    " each of them with norm 1, with Gaussian noise. Whoever reads all replies of the client in"
    " this run learns of any one record or group no more than `privacy.epsilon` and `privacy.delta`"
    " allow, if `privacy.noise` is `secure`."
)

EXAMPLES: dict[Kind, dict[str, int]] = {"push": {"decided": 2}}
"""Example fields by kind for a model of two blocks; the contract of the kind depends on them."""


METHOD = Row(
    title=(
        "Pooled pruning (Wanda or RIA on the sum of the clients' squared inputs, as if all text"
        " were in one place)"
    ),
    settings=PooledPruningSettings,
    strategy="strategies.pruning.pooled_pruning:PooledPruning",
    job="client_app.methods.pruning.pooled_pruning",
    dry_run="server_app.estimate.messages.pruning:DryPooledPruning",
    work="server_app.estimate.work.pruning:Pooled",
    outcome="server_app.artifacts.pruned_model:PooledOutcome",
    baseline="strategies.baselines:pooled_by_all",
    summands=summands,
    to_summands="client_app.summands.statistics:of_input_sums",
)
