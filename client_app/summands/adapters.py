"""Summands of trained tensors: adapters, an encoder's head, and SFT-P's generator."""

from collections.abc import Callable, Mapping
from typing import Any

from espalier.messages.sums.summands import Numbers
from espalier.messages.sums.summed_weights import WEIGHT, own_weight, weight_summand
from espalier.messages.tensor_blobs import views
from espalier.methods.tuning.adapters.summands import value_scale
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings


def of_adapters(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the weighted values of a blob in fixed point, clipped, or the weight.

    Blobs have the values themselves: other wire dtypes than float32 are refused with secure sums.
    """
    weight = own_weight(report["samples"], run)
    if key == WEIGHT:
        return weight_summand(weight)
    scale = value_scale(run)
    return {name: scale.integers(values, weight) for name, values in views(blob(key)).items()}
