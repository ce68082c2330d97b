"""LLM-Pruner and Mask Tuning: settings and contracts.

Clients send a score per prunable group by its effect on the loss. For Mask Tuning they send factors
of the Fisher information and normal equations.

The Fisher information is that of the masks, and the equations determine the scales of prunable
groups. Source: Kwon et al. 2022. The equations refer to a model that is cut already. Every request
includes the cut, so that their shapes are a function of the request.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import SomeOfEachKindStays, cut_specs, push_of_cuts, read_cut
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody
from espalier.messages.parts import Reply
from espalier.messages.sums.summands import SumSpec, SumSpecs
from espalier.messages.tensor_blobs import TensorSpec, tensor_specs, views
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import GROUP_KINDS, sizes_of
from espalier.models.triangles import ROUNDING, are_inner_products, triangle_size
from espalier.settings.pruning import Selection, StructuredSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from pruning_kernels.bounded_fixed_point import Scale, fraction_that_fits, signed_bits

Refined = Literal["off", "groups", "all"]
"""Kinds of prunable groups that a refinement includes."""
KINDS_OF: dict[Refined, tuple[str, ...]] = {
    "off": (),
    "groups": ("groups",),
    "all": ("groups", "channels"),
}


class LlmPrunerSettings(StructuredSettings):
    """Table ``[llm-pruner]`` (Ma et al. 2023, section 3.2)."""

    MAKES_LOCAL_BASELINE_WITH: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "llm-pruner.rescale": ("all", "groups")
    }
    SUMMED_WITH: ClassVar[Mapping[str, Any]] = {
        "llm-pruner.element": "signed",
        "llm-pruner.rearrange": "off",
        "llm-pruner.rescale": "off",
    }
    SELECTIONS: ClassVar[tuple[Selection, ...]] = ("block", "global", "kind", "search")
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1, 2)
    WHY_NO_OTHER_RULE = (
        "its scores are limited relative to the median client's, and Fisher factors and normal"
        " equations are matrices whose numbers belong together"
    )
    READ_WITH: ClassVar[ReadWith] = {"rearrange": {"element": ("squared",)}}

    element: Literal["absolute", "signed", "squared"] = Field(
        "absolute",
        description=(
            "Sum of weight times gradient over a prunable group: of magnitudes, as in the"
            " published code; of signed values, so that clients' sums are exactly those of pooled"
            " data; or `squared`, the square of each sample's signed sum, which is the diagonal of"
            " the Fisher information of a mask (Mask Tuning)."
        ),
    )
    spare_first: int = Field(
        1, ge=0, description="Number of first blocks that are not pruned; the paper spares 4 of 32."
    )
    spare_last: int = Field(
        1, ge=0, description="Number of last blocks that are not pruned; the paper spares 2 of 32."
    )
    rearrange: Refined = Field(
        "off",
        description=(
            "Second stage of Mask Tuning: as many attention groups (or also channels, `all`) of"
            " each block are removed as before, but different ones if the loss then increases less,"
            " by the Fisher information of each pair of masks. A client sends up to"
            " `data.num-samples` more numbers for each group."
        ),
    )
    rescale: Refined = Field(
        "off",
        description=(
            "Third stage of Mask Tuning, in one more round: attention groups (or also channels,"
            " `all`) that stay are scaled so that the output of a block's part comes close to that"
            " with all groups. A client sends half the square of the number of groups that stay,"
            " per block."
        ),
    )

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if self.element == "squared":
            return (
                "llm-pruner.element = 'squared': squares of single samples differ by more orders of"
                " magnitude than the summed integers hold; set it to 'signed' or 'absolute'"
            )
        if self.rescale != "off":
            return (
                f"llm-pruner.rescale = '{self.rescale}': the numbers of the normal equations have"
                " no bound that is known before; set it to 'off'"
            )
        return ""

    @property
    def rearranged(self) -> tuple[str, ...]:
        """Kinds of prunable groups that are rearranged."""
        return KINDS_OF[self.rearrange]

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Kinds of prunable groups that are rescaled."""
        return KINDS_OF[self.rescale]

    @property
    def has_local_baseline(self) -> bool:
        """True if groups are rescaled.

        The round that rescales uses the groups chosen from all clients' scores, so a local baseline
        needs a message of its own.
        """
        return bool(self.rescaled)

    def num_rounds(self, federation: FederationSettings) -> int:
        """Return the number of rounds: one that computes scores, and one that rescales."""
        return 1 + bool(self.rescaled)


JOINT = "joint"
"""Name of the tensor with the inner products of the outputs of every two remaining groups.

It is the upper triangle of a symmetric matrix.
"""
AIMS = "aims"
"""Name of the tensor with the inner products of the remaining groups' outputs and their targets.

The target is the output of all groups of the block and kind, including the cut ones.
"""
TINY = 1e-30
"""Absolute tolerance for rounding errors of numbers near 0."""
MAX_BYTES = 1 << 30
"""Maximum size of a blob in bytes; ``part-bytes`` has the same limit."""


def fisher_name(kind: str) -> str:
    """Return the tensor name of the Fisher factor of a kind of prunable group."""
    return f"{kind}.fisher"


def fisher_spec(groups: int, run: RunSettings) -> TensorSpec:
    """Return the spec of a factor as it is sent: flat, without the zeros below its diagonal."""
    # The rank is at most the number of samples, so more rows would add no information.
    rows = min(run.data.num_samples, groups)
    # Row i of the triangular factor has i leading zeros, which are not sent.
    return TensorSpec("F32", (rows * groups - triangle_size(rows - 1),))


def require_factor(key: str, factor: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Check that a factor is finite and that its squares do not exceed the scores.

    A score is the sum of the squares of a column. The limit on a client's scores therefore also
    limits its factor. Raises ProtocolError if the check fails.
    """
    max_sum = float(scores.sum(dtype=np.float64)) * (1 + ROUNDING) + TINY
    if not (np.isfinite(factor).all() and np.square(factor, dtype=np.float64).sum() <= max_sum):
        raise ProtocolError(
            f"{key}: a factor's number is not finite, or its squares are more than the scores"
        )


# ----- rescaling -----


def request_cut(request: MessageBody, plan: ModelPlan) -> Cut | None:
    """Return the cut that a request states; None if it is malformed.

    The contract of the request then refuses it.
    """
    specs = cut_specs(plan, ())
    if request.blobs.keys() != specs.keys() or any(
        tensor_specs(blob) != specs[key] for key, blob in request.blobs.items()
    ):
        return None
    return read_cut(Groups.of(plan), lambda index: request.blobs[block_key(index)])


def equation_key(index: int, kind: str) -> str:
    """Return the key of the blob with the equations of a block and kind."""
    return f"{block_key(index)}-{kind}"


def equation_places(plan: ModelPlan, cut: Cut, job: LlmPrunerSettings) -> list[tuple[int, str]]:
    """Return the blocks and kinds with equations, in order: those with at least one cut group."""
    groups = Groups.of(plan)
    return [
        (block.index, kind)
        for block in plan.blocks
        for kind in job.rescaled
        if cut[groups.at(block.index, kind)].any()
    ]


def equation_specs(
    plan: ModelPlan, cut: Cut | None, job: LlmPrunerSettings
) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per block and kind.

    Parameters
    ----------
    plan : plan of the uncut model
    cut : cut of the request. If it is None, the specs are those of equations for all groups, which
        are an upper limit.
    """
    groups = Groups.of(plan)
    if cut is None:
        cut = groups.none
        places = [(block.index, kind) for block in plan.blocks for kind in job.rescaled]
    else:
        places = equation_places(plan, cut, job)
    # Only groups that stay have equations.
    num_kept = {place: int((~cut[groups.at(*place)]).sum()) for place in places}
    return {
        equation_key(*place): {
            JOINT: TensorSpec("F32", (triangle_size(size),)),
            AIMS: TensorSpec("F32", (size,)),
        }
        for place, size in num_kept.items()
    }


def require_sendable(plan: ModelPlan, job: LlmPrunerSettings) -> None:
    """Check that the normal equations of every block fit in a message.

    Raises
    ------
    ProtocolError
        If they do not; the error begins with a key of the method's table.
    """
    for block in plan.blocks:
        for kind in job.rescaled:
            num_groups = getattr(sizes_of(plan, block), kind)
            # float32
            if (size := 4 * triangle_size(num_groups)) > MAX_BYTES:
                raise ProtocolError(
                    f"llm-pruner.rescale = '{job.rescale}': the normal equations of {num_groups}"
                    f" {kind} of a block take up to {size} bytes, a message has {MAX_BYTES}; set it"
                    " to 'groups' or 'off'"
                )


def require_equations(key: str, blob: bytes) -> None:
    """Check that normal equations can come from real outputs.

    Raises ProtocolError if a number is not finite, or if the numbers cannot be inner products.
    """
    tensors = views(blob)
    aims = tensors[AIMS]
    if not (np.isfinite(aims).all() and are_inner_products(tensors[JOINT], len(aims), TINY)):
        raise ProtocolError(
            f"{key}: a number is not finite, or the numbers are not inner products of the outputs"
            " of groups"
        )


SCORE_EXPONENT = 16
"""Scores are clipped to 2^16 as summands; the loss itself is of the order of 1 to 10."""
MAX_FRACTION_BITS = 44
"""Maximum number of bits after the point of a score as a summand."""


def score_name(kind: str) -> str:
    """Return the tensor name of the scores of a kind of prunable group."""
    return f"{kind}.score"


def cut_blocks(plan: ModelPlan, job: LlmPrunerSettings) -> range:
    """Return the numbers of the blocks that may be cut.

    Raises ProtocolError if the settings spare all blocks.
    """
    blocks = range(job.spare_first, len(plan.blocks) - job.spare_last)
    if not blocks:
        raise ProtocolError(
            f"llm-pruner.spare-first = {job.spare_first}, llm-pruner.spare-last = {job.spare_last}:"
            f" the model has {len(plan.blocks)} blocks, of which none could be cut; lower them"
        )
    return blocks


def score_specs(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per block that may be cut.

    Each has a score per prunable group and, for each rearranged kind, a factor of the Fisher
    information.
    """
    job = run.of(LlmPrunerSettings)
    specs = {}
    for index in cut_blocks(plan, job):
        sizes = sizes_of(plan, plan.blocks[index])
        scores = {
            score_name(kind): TensorSpec("F32", (getattr(sizes, kind),)) for kind in GROUP_KINDS
        }
        factors = {
            fisher_name(kind): fisher_spec(getattr(sizes, kind), run) for kind in job.rearranged
        }
        specs[block_key(index)] = scores | factors
    return specs


def score_scale(run: RunSettings) -> Scale:
    """Return the fixed point of scores, in the 64 bits of a sum."""
    fraction = fraction_that_fits(SCORE_EXPONENT, run.num_clients, 1, MAX_FRACTION_BITS)
    return Scale(SCORE_EXPONENT, fraction)


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of the scores as summands, of each block that may be cut."""
    bits = signed_bits(SCORE_EXPONENT + score_scale(run).fraction_bits, run.num_clients)
    return {
        key: {name: SumSpec(spec.shape[0], bits) for name, spec in specs.items()}
        for key, specs in score_specs(plan, run).items()
    }


def possible(key: str, blob: bytes, lowest: float, rearranged: tuple[str, ...] = ()) -> None:
    """Check the scores and factors of one block.

    Raises ProtocolError if a score is not finite or below ``lowest``, or if a factor contradicts
    the scores.

    Parameters
    ----------
    lowest : minimum of a score
    rearranged : kinds with a factor
    """
    tensors = views(blob)
    for kind in GROUP_KINDS:
        scores = tensors[score_name(kind)]
        if not (np.isfinite(scores).all() and scores.min() >= lowest):
            raise ProtocolError(f"{key}: a score is not a finite number, or below {lowest:g}")
    for kind in rearranged:
        require_factor(key, tensors[fisher_name(kind)], tensors[score_name(kind)])


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    job = run.of(LlmPrunerSettings)
    plan = plan_of()
    if request.header.server_round > 1:
        return _equations(request, plan, run).contract(request, run)
    specs = score_specs(plan, run)
    # Only signed sums of weight times gradient can be negative.
    lowest = -np.inf if job.element == "signed" else 0.0
    reply = Reply(
        specs=specs,
        observer=OBSERVER,
        more="The same of further blocks, as in train of round 1.",
        check_values=partial(possible, lowest=lowest, rearranged=job.rearranged),
    )
    return reply.contract(request, run)


def _equations(request: MessageBody, plan: ModelPlan, run: RunSettings) -> Reply:
    """Return the reply of the rescaling round, in which every request includes the cut."""
    specs = equation_specs(plan, request_cut(request, plan), run.of(LlmPrunerSettings))
    along = cut_specs(plan, ())
    return Reply(
        specs=specs,
        observer=OBSERVER_OF_EQUATIONS,
        more="The same of further blocks, as in train of round 2.",
        request_blobs=along,
        fetched_with=along,
        check_request=SomeOfEachKindStays(plan),
        check_values=require_equations,
    )


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` with a part of the cut for evaluation."""
    return push_of_cuts(request, plan_of, run, (), run.of(LlmPrunerSettings).rescaled)


OBSERVER = (
    "One number for every key-value group and feed-forward channel of the blocks that may be"
    " pruned: weights times the gradient of this client's loss on its samples, summed over the"
    " group, or the squares of such sums, added up over samples. The site's `min-tokens` sets the"
    " minimum number of tokens. There are far fewer numbers than in the gradient; they tell which"
    " groups the text uses. A reader who knows some of the samples may recognise them. With"
    " `rearrange` also how the sums of each two groups of a block and kind are correlated over"
    " samples. From this the sums of each sample can be computed except for an unknown rotation"
    " among samples, or the sign of a single sample; with fewer samples than groups also the number"
    " of samples. Also how long the work took."
)
OBSERVER_OF_EQUATIONS = (
    "For each two groups or channels of a block that stay: the inner product of what they add to"
    " the residual stream, summed over all tokens of this client's samples in the pruned model, and"
    " for each the inner product with what all groups of the block would add. It tells which groups"
    " are active together on the text. The site's `min-tokens` sets the minimum number of tokens."
    " The server chooses what is removed, and so it influences what it learns. A reader who knows"
    " some of the samples may recognise them. Also how long the work took."
)


METHOD = Row(
    title=(
        "LLM-Pruner (groups by what the loss would change without them, scores summed over clients)"
    ),
    settings=LlmPrunerSettings,
    strategy="strategies.pruning.llm_pruner:LlmPruner",
    job="client_app.methods.pruning.llm_pruner",
    summands=summands,
    to_summands="client_app.summands.statistics:of_scores",
    dry_run="server_app.estimate.messages.pruning:DryLlmPruner",
    work="server_app.estimate.work.pruning:WholeGradient",
    outcome="server_app.artifacts.structured_model:StructuredOutcome",
    baseline="strategies.baselines:llm_pruner_of_all",
)
