"""Contracts of LLM-Pruner: a score per prunable group, and statistics for Mask Tuning."""

from functools import partial

import numpy as np

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import SomeOfEachKindStays, cut_specs, delivery_of_cuts
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody
from espalier.messages.parts import Reply
from espalier.messages.tensor_blobs import TensorSpec, views
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
    specs = equation_specs(plan, told_cut(request, plan), run.of(LlmPrunerSettings))
    along = cut_specs(plan, ())
    return Reply(
        specs=specs,
        observer=OBSERVER_OF_EQUATIONS,
        more="The same of further blocks, as in train of round 2.",
        brought=along,
        fetched_with=along,
        check_brought=SomeOfEachKindStays(plan),
        check_values=require_equations,
    )


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` that pushes a part of the cut for evaluation."""
    return delivery_of_cuts(request, plan_of, run, (), run.of(LlmPrunerSettings).rescaled)


def sizes_vary(run: RunSettings) -> bool:
    """Return True with rescaling: the size of the equations depends on which groups stay."""
    return bool(run.of(LlmPrunerSettings).rescaled)


OBSERVER = (
    "One number for every key-value group and feed-forward channel of the blocks that may be"
    " pruned: weights times the gradient of this client's loss on its samples, summed over the"
    " group, or the squares of such sums, added up over samples. The site's `min-tokens` sets the"
    " minimum number of tokens. There are far fewer numbers than in the gradient; they tell which"
    " groups the text uses. Whoever knows some of the samples may recognise them. With `rearrange`"
    " also how the sums of each two groups of a block and kind are correlated over samples. From"
    " this the sums of each sample can be computed except for an unknown rotation among samples, or"
    " the sign of a single sample; with fewer samples than groups also the number of samples. Also"
    " how long the work took."
)
OBSERVER_OF_EQUATIONS = (
    "For each two groups or channels of a block that stay: the inner product of what they add to"
    " the residual stream, summed over all tokens of this client's samples in the pruned model, and"
    " for each the inner product with what all groups of the block would add. It tells which groups"
    " are active together on the text. The site's `min-tokens` sets the minimum number of tokens."
    " The server chooses what is removed, and so it influences what it learns. Whoever knows some"
    " of the samples may recognise them. Also how long the work took."
)
