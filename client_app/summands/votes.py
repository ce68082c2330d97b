"""Summands of masks: votes, and the kept weights of FedSpaLLM.

Each vote is 0 or 1 in the fewest bits that hold the number of clients, so that their sum is the count
that the server makes of masks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from espalier.messages.blobs.masks import kept_name, mask_name, votes_name
from espalier.messages.sums.summands import Numbers
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings, kept_scale
from espalier.models.plan import BlockPlan, ModelPlan
from espalier.settings.run import RunSettings
from pruning_kernels.votes.bitmask import unpack


def of_masks(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return the votes on a block of a reply with masks (FedPrLLM), by tensor name."""
    return _votes(plan.block(key), blob(key))


def of_kept(
    key: str,
    blob: Callable[[str], bytes],
    report: Mapping[str, Any],
    plan: ModelPlan,
    run: RunSettings,
) -> Mapping[str, Numbers]:
    """Return votes and, if clients change weights, kept weights of a layer (FedSpaLLM).

    A pruned weight adds zero. Kept weights are clipped (``kept_scale``).
    """
    block = plan.block(key)
    found = _votes(block, blob(key))
    if run.of(FedSpaLLMSettings).changes_weights:
        found |= _kept(block, blob(key))
    return found


def _votes(block: BlockPlan, blob: bytes) -> dict[str, Numbers]:
    """Return the votes to prune each weight, 0 or 1, by tensor name: (num_weights,) uint64."""
    masks = views(blob)
    found = {}
    for linear in block.linears:
        prune_mask = unpack(masks[mask_name(linear.name)], (linear.num_weights,))
        found[votes_name(linear.name)] = prune_mask.astype(np.uint64)
    return found


def _kept(block: BlockPlan, blob: bytes) -> dict[str, Numbers]:
    """Return the kept weights of a block in fixed point, with zeros at pruned places."""
    tensors = views(blob)
    found = {}
    for linear in block.linears:
        keep = ~unpack(tensors[mask_name(linear.name)], (linear.num_weights,))
        kept = tensors[kept_name(linear.name)]
        if linear.dtype == "BF16":
            # NumPy has no bfloat16, whose bits are the upper half of a float32.
            kept = (kept.astype(np.uint32) << np.uint32(16)).view(np.float32)
        whole = np.zeros(linear.num_weights, np.uint64)
        whole[keep] = kept_scale(linear).integers(kept)
        found[kept_name(linear.name)] = whole
    return found
