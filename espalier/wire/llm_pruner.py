"""Contracts of LLM-Pruner: a score for each unit that may be cut."""

from functools import partial
from typing import Any

import numpy as np

from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import Contract
from espalier.wire.cuts import KINDS, delivery_of_cuts
from espalier.wire.messages import Kind, Letter, NoScalars
from espalier.wire.parts import PartRequest, Reply, Report, parts_of
from espalier.wire.payload import TensorSpec, block_key, views
from espalier.wire.plan import ModelPlan, PlanOf
from espalier.wire.structure import units_of


def score_name(kind: str) -> str:
    """Tensor name of the scores of a block's units of a kind."""
    return f"{kind}.score"


def cut_blocks(plan: ModelPlan, job: LlmPrunerSettings) -> range:
    """Blocks of which units may be cut.

    Raises
    ------
    Mistake
        All are spared.
    """
    blocks = range(job.spare_first, len(plan.blocks) - job.spare_last)
    if not blocks:
        raise Mistake(
            f"spare-first = {job.spare_first}, spare-last = {job.spare_last}: the model has {len(plan.blocks)} blocks, of "
            "which none could be cut; lower them"
        )
    return blocks


def score_specs(plan: ModelPlan, job: LlmPrunerSettings) -> dict[str, dict[str, TensorSpec]]:
    """The blobs of a reply: for each block a number per group and per channel."""
    return {
        block_key(index): {
            score_name(kind): TensorSpec("F32", (getattr(units_of(plan, plan.blocks[index]), kind),)) for kind in KINDS
        }
        for index in cut_blocks(plan, job)
    }


def possible(key: str, blob: bytes, lowest: float) -> None:
    """Raise Mistake if a score is none, or below what a sum can be."""
    for scores in views(blob).values():
        if not (np.isfinite(scores).all() and scores.min() >= lowest):
            raise Mistake(f"{key}: a score is no finite number, or below {lowest:g}")


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    job = run.of(LlmPrunerSettings)
    specs, lowest = score_specs(plan_of(), job), -np.inf if job.element == "signed" else 0.0
    reply = Reply(
        order=NoScalars,
        part_order=PartRequest,
        report=Report,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer=OBSERVER,
        more="the scores of further blocks, as in train",
        check_values=partial(possible, lowest=lowest),
    )
    return reply.contract(request, run.method)


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``deliver``: a part of what is cut, on its way to a client that evaluates it."""
    return delivery_of_cuts(request, plan_of, run, ())


OBSERVER = (
    "for every key-value group and feed-forward channel of the blocks that may be cut one number: weights times the gradient "
    "of this client's loss on all its windows, summed over the unit, or the squares of such sums, window by window, added up "
    "(who guesses the text of all windows can confirm the guess; the site's `least-tokens` says how much that is at least; the "
    "sums are far fewer than the gradient's numbers, and say by which units the text moves the model); and how long it took"
)

EXAMPLES: dict[Kind, dict[str, Any]] = {}
"""Scalars of requests by kind: the contracts depend on none."""
