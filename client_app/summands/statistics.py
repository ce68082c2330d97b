"""Summands of statistics of calibration samples."""

from collections.abc import Callable, Mapping
from typing import Any

from espalier.messages.sums.summands import Numbers
from espalier.messages.sums.summed_weights import WEIGHT, own_weight, weight_summand
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.llm_pruner import score_scale
from espalier.methods.pruning.pooled_pruning import COUNT
from espalier.methods.pruning.slicegpt import MOMENTS, moment_scale
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from pruning_kernels.wide_integers import to_wide


def of_input_sums(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the sums of a block, which are in fixed point already, and the count (FLAP, pooled pruning).

    Nothing is rounded or clipped: a client refuses to send a number that is out of range.
    """
    return {
        name: words.copy() if name == COUNT else to_wide(words)
        for name, words in views(blob(key)).items()
    }


def of_scores(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the scores of a block's groups in fixed point, clipped (LLM-Pruner)."""
    scale = score_scale(run)
    scores = views(blob(key))
    return {name: scale.integers(own) for name, own in scores.items()}


def of_moments(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the weighted second moments of a place in fixed point, or the weight (SliceGPT)."""
    weight = own_weight(report["samples"], run)
    if key == WEIGHT:
        return weight_summand(weight)
    moments = views(blob(key))[MOMENTS]
    return {MOMENTS: moment_scale(plan, run).integers(moments, weight)}
