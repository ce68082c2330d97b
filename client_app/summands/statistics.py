"""Summands of statistics of calibration samples."""

from collections.abc import Mapping

from client_app.summands.plain_blob import PlainBlob
from espalier.messages.sums.summands import Numbers
from espalier.messages.sums.summed_weights import weight_summand
from espalier.methods.pruning.llm_pruner import score_scale
from espalier.methods.pruning.pooled_pruning import COUNT
from espalier.methods.pruning.slicegpt import MOMENTS, moment_scale
from pruning_kernels.wide_integers import to_wide


def of_input_sums(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return a block's sums, already in fixed point, and the count (FLAP, pooled pruning).

    Nothing is rounded or clipped: a client refuses to send a number that is out of range.
    """
    return {
        # A count is an integer already. Wide integers show no carries of single clients.
        name: words.copy() if name == COUNT else to_wide(words)
        for name, words in blob.tensors().items()
    }


def of_scores(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return the scores of a block's groups in fixed point, clipped (LLM-Pruner)."""
    scale = score_scale(blob.run)
    return {name: scale.integers(values) for name, values in blob.tensors().items()}


def of_moments(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return the weighted second moments of a place in fixed point, or the weight (SliceGPT)."""
    if blob.is_weight:
        return weight_summand(blob.weight)
    moments = blob.tensors()[MOMENTS]
    return {MOMENTS: moment_scale(blob.plan, blob.run).integers(moments, blob.weight)}
