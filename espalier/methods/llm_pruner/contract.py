"""Contracts of LLM-Pruner: a score per prunable group, and statistics for Mask Tuning."""

from functools import partial
from typing import Any

import numpy as np

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import SomeOfEachKindStays, cut_specs, delivery_of_cuts
from espalier.messages.contract import Contract
from espalier.messages.message import Kind, Letter, NoScalars
from espalier.messages.parts import PartRequest, Reply, Report, parts_of
from espalier.messages.payload import TensorSpec, views
from espalier.methods.llm_pruner.mask_tuning import (
    equation_specs,
    fisher_name,
    fisher_spec,
    require_equations,
    require_factor,
    told_cut,
)
from espalier.methods.llm_pruner.settings import LlmPrunerSettings
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import GROUP_KINDS, sizes_of
from espalier.settings.run import RunSettings


def score_name(kind: str) -> str:
    """Return the tensor name of the scores of a kind of prunable group."""
    return f"{kind}.score"


def cut_blocks(plan: ModelPlan, job: LlmPrunerSettings) -> range:
    """Return the numbers of the blocks that may be cut.

    Raises
    ------
    ProtocolError
        If the settings spare all blocks.
    """
    blocks = range(job.spare_first, len(plan.blocks) - job.spare_last)
    if not blocks:
        raise ProtocolError(
            f"spare-first = {job.spare_first}, spare-last = {job.spare_last}: the model has"
            f" {len(plan.blocks)} blocks, of which none could be cut; lower them"
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
        own = {score_name(kind): TensorSpec("F32", (getattr(sizes, kind),)) for kind in GROUP_KINDS}
        factors = {
            fisher_name(kind): fisher_spec(getattr(sizes, kind), run) for kind in job.rearranged
        }
        specs[block_key(index)] = own | factors
    return specs


def possible(key: str, blob: bytes, lowest: float, rearranged: tuple[str, ...] = ()) -> None:
    """Check the scores and factors of one block.

    Parameters
    ----------
    key
        Key of the blob.
    blob
        The blob.
    lowest
        Minimum of a score.
    rearranged
        Kinds with a factor.

    Raises
    ------
    ProtocolError
        If a score is not finite or below ``lowest``, or if a factor contradicts the scores.
    """
    tensors = views(blob)
    for kind in GROUP_KINDS:
        scores = tensors[score_name(kind)]
        if not (np.isfinite(scores).all() and scores.min() >= lowest):
            raise ProtocolError(f"{key}: a score is no finite number, or below {lowest:g}")
    for kind in rearranged:
        require_factor(key, tensors[fisher_name(kind)], tensors[score_name(kind)])


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    job = run.of(LlmPrunerSettings)
    plan = plan_of()
    if request.header.server_round > 1:
        return _equations(request, plan, run).contract(request, run.method)
    specs = score_specs(plan, run)
    lowest = -np.inf if job.element == "signed" else 0.0
    reply = Reply(
        order=NoScalars,
        part_order=PartRequest,
        report=Report,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer=OBSERVER,
        more="the same of further blocks, as in train of round 1",
        check_values=partial(possible, lowest=lowest, rearranged=job.rearranged),
    )
    return reply.contract(request, run.method)


def _equations(request: Letter, plan: ModelPlan, run: RunSettings) -> Reply:
    """Return the reply of the rescaling round, in which every request includes the cut."""
    specs = equation_specs(plan, told_cut(request, plan), run.of(LlmPrunerSettings))
    along = cut_specs(plan, ())
    return Reply(
        order=NoScalars,
        part_order=PartRequest,
        report=Report,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer=OBSERVER_OF_EQUATIONS,
        more="the same of further blocks, as in train of round 2",
        brought=along,
        fetched_with=along,
        check_brought=SomeOfEachKindStays(plan),
        check_values=require_equations,
    )


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` that pushes a part of the cut for evaluation."""
    return delivery_of_cuts(request, plan_of, run, (), run.of(LlmPrunerSettings).rescaled)


def sizes_vary(run: RunSettings) -> bool:
    """Return True with rescaling: the size of the equations depends on which groups stay."""
    return bool(run.of(LlmPrunerSettings).rescaled)


OBSERVER = (
    "for every key-value group and feed-forward channel of the blocks that may be cut one number:"
    " weights times the gradient of this client's loss on all its windows, summed over the group, or"
    " the squares of such sums, window by window, added up (who knows some of the windows may"
    " recognise them; the site's `least-tokens` says how many tokens they are at least; the sums"
    " are far fewer than the gradient's numbers, and say by which groups the text moves the model);"
    " with `rearrange`, how such sums of each two groups of a block and kind go together over"
    " windows, from which those of each window can be worked out but for a rotation among windows,"
    " which is unknown (of a single window but for the sign; with fewer windows than groups also how"
    " many they are); and how long it took"
)
OBSERVER_OF_EQUATIONS = (
    "for each two groups or channels of a block that stay, how what they add to the residual stream"
    " goes together, summed over all tokens of this client's windows in the model that is cut (the"
    " site's `least-tokens` says over how many at least), and for each the same with what all groups"
    " of the block would add: which groups are at work at once on its text; the server says what is"
    " cut, so it chooses at which groups it looks; who knows some of the windows may recognise them;"
    " and how long it took"
)

EXAMPLES: dict[Kind, dict[str, Any]] = {}
"""Example fields by kind; empty because no contract depends on them."""
