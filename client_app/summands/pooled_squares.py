"""Summands of pooled pruning: sums of squares as integers of 128 bits, and the count."""

from collections.abc import Callable, Mapping
from typing import Any

from espalier.messages.summands import Numbers
from espalier.messages.tensor_blobs import views
from espalier.methods.pooled_pruning import COUNT
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from pruning_kernels.wide_integers import to_wide


def to_summands(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the summands of a block, by tensor name; they lose nothing of the plain numbers."""
    return {
        name: words.copy() if name == COUNT else to_wide(words)
        for name, words in views(blob(key)).items()
    }
