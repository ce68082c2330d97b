"""FLAP: settings and contracts.

Clients send sums and sums of squares of the inputs of two matrices per block, in the fixed point of
pooled pruning. Mean and variance of all clients' inputs follow from the sums. Channels that
fluctuate least are removed.
"""

from functools import partial
from typing import ClassVar

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import push_of_cuts
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody
from espalier.messages.parts import MAX_SAMPLES, Reply
from espalier.messages.sums.summands import WIDE_BITS, SumSpec, SumSpecs, bits_for
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.methods.pruning import pooled_pruning
from espalier.methods.pruning.pooled_pruning import COUNT, squares_name
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import ADDED_BIASES
from espalier.settings.pruning import StructuredSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from pruning_kernels.fixed_point import as_floats, is_possible


class FlapSettings(StructuredSettings):
    """Table ``[flap]`` (An et al. 2024, section 3), with the metric WIFV."""

    FEDERATION: ClassVar[tuple[str, ...]] = (*StructuredSettings.FEDERATION, "trimmed-clients")
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean", "trimmed-mean", "median")

    bias_compensation: bool = Field(
        True,
        description=(
            "Add the mean of what was removed as a bias, also in families that have no bias there"
            " (section 3.4)."
        ),
    )


FRACTION_BITS = pooled_pruning.FRACTION_BITS["tokens"]
"""Bits after the point of all numbers; sums and sums of squares stay below 2^39."""
MAX_INPUT = 1e6
"""Maximum root mean square of an input channel.

No real model exceeds it, so sums beyond it are not honest.
"""
ROUNDING = 1e-9
"""Relative tolerance for rounding errors of sums."""


def sums_name(linear: str) -> str:
    """Return the tensor name of the sums of the inputs of a matrix, by channel."""
    return f"{linear}.sums"


def input_specs(plan: ModelPlan) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per block.

    Each has two words per input channel of the attention output and of the down projection for the
    sum of inputs, two for the sum of squares, and the number of tokens.
    """
    specs = {}
    for block in plan.blocks:
        block_specs = {
            name(linear): TensorSpec("U64", (2, block.linear(linear).shape[1]))
            for linear in ADDED_BIASES
            for name in (sums_name, squares_name)
        }
        specs[block_key(block.index)] = block_specs | {COUNT: TensorSpec("U64", (1,))}
    return specs


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of a reply's sums as summands, in block order."""
    tokens = bits_for(run.num_clients * most_tokens(run))
    return {
        key: {
            name: SumSpec(1, tokens) if name == COUNT else SumSpec(spec.shape[1], WIDE_BITS)
            for name, spec in specs.items()
        }
        for key, specs in input_specs(plan).items()
    }


def most_tokens(run: RunSettings) -> int:
    """Return the maximum number of tokens of a client."""
    return MAX_SAMPLES * run.data.sequence_length


def possible(key: str, blob: bytes, most: int) -> None:
    """Check that sums can come from the inputs of a model over at most ``most`` tokens.

    Raises ProtocolError if the number of tokens or a number is out of range, or if the square of a
    sum is larger than sums of squares allow (Cauchy-Schwarz).
    """
    tensors = views(blob)
    if not 1 <= (tokens := int(tensors[COUNT][0])) <= most:
        raise ProtocolError(f"{key} {COUNT}: {tokens} is not between 1 and {most} tokens")
    for linear in ADDED_BIASES:
        sums = tensors[sums_name(linear)]
        squares = tensors[squares_name(linear)]
        fits = is_possible(sums, signed=True) and is_possible(squares, signed=False)
        if fits:
            total = as_floats(sums, FRACTION_BITS)
            # (sum x)^2 <= tokens * sum x^2 for every channel.
            energy = as_floats(squares, FRACTION_BITS)
            # The small term allows for the rounding of numbers near 0.
            most_energy = energy * tokens * (1 + ROUNDING) + tokens * 2.0**-40
            fits = bool((total**2 <= most_energy).all())
            fits = fits and bool((energy <= tokens * MAX_INPUT**2).all())
        if not fits:
            raise ProtocolError(
                f"{key} {linear}: sums are out of range, or contradict the sums of squares"
            )


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    reply = Reply(
        specs=input_specs(plan_of()),
        observer=OBSERVER,
        more="The sums of further blocks, as in train.",
        check_values=partial(possible, most=most_tokens(run)),
    )
    return reply.contract(request, run)


def biases(run: RunSettings) -> tuple[str, ...]:
    """Return the names of the matrices that get a bias."""
    return ADDED_BIASES if run.of(FlapSettings).bias_compensation else ()


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` with a part of the cut for evaluation."""
    return push_of_cuts(request, plan_of, run, biases(run))


OBSERVER = (
    "For every input channel of the attention's output and of `down`, in every block: the sum over"
    " this client's samples and the sum of squares, from which mean and variance follow, and the"
    " number of tokens. Over few tokens the"
    " means come close to the values of single tokens; the site's `min-tokens` sets the minimum."
    " A reader who knows some of the samples can recognise them in the reply, whatever `min-tokens`"
    " says. Also how long the work took."
)


METHOD = Row(
    title=(
        "FLAP (attention groups and channels that fluctuate least are cut, on pooled statistics)"
    ),
    settings=FlapSettings,
    strategy="strategies.pruning.flap:Flap",
    job="client_app.methods.pruning.flap",
    summands=summands,
    to_summands="client_app.summands.statistics:of_input_sums",
    dry_run="server_app.estimate.messages.pruning:DryCutting",
    work="server_app.estimate.work.pruning:CutWork",
    outcome="server_app.artifacts.structured_model:StructuredOutcome",
    baseline="strategies.baselines:flap_of_all",
)
