"""Summands of masks: votes, and the kept weights of FedSpaLLM.

Each vote is 0 or 1 in the fewest bits that hold the number of clients, so that their sum is the
count that the server makes of masks.
"""

from collections.abc import Mapping

import numpy as np

from client_app.summands.plain_blob import PlainBlob
from espalier.messages.blobs.masks import kept_name, mask_name, votes_name
from espalier.messages.sums.summands import Numbers
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings, kept_scale
from pruning_kernels.votes.bitmask import unpack


def of_masks(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return the votes on a block of a reply with masks (FedPrLLM), by tensor name."""
    return _votes(blob)


def of_kept(blob: PlainBlob) -> Mapping[str, Numbers]:
    """Return votes and, if clients change weights, kept weights of a layer (FedSpaLLM).

    A pruned weight adds zero. Kept weights are clipped (``kept_scale``).
    """
    changes = blob.run.of(FedSpaLLMSettings).changes_weights
    return _votes(blob) | (_kept(blob) if changes else {})


def _votes(blob: PlainBlob) -> dict[str, Numbers]:
    """Return the votes to prune each weight, 0 or 1, by tensor name: (num_weights,) uint64."""
    masks = blob.tensors()
    votes = {}
    for linear in blob.block.linears:
        prune_mask = unpack(masks[mask_name(linear.name)], (linear.num_weights,))
        votes[votes_name(linear.name)] = prune_mask.astype(np.uint64)
    return votes


def _kept(blob: PlainBlob) -> dict[str, Numbers]:
    """Return the kept weights of a block in fixed point, with zeros at pruned places."""
    tensors = blob.tensors()
    kept_weights = {}
    for linear in blob.block.linears:
        keep = ~unpack(tensors[mask_name(linear.name)], (linear.num_weights,))
        kept = tensors[kept_name(linear.name)]
        if linear.dtype == "BF16":
            # NumPy has no bfloat16, whose bits are the upper half of a float32.
            kept = (kept.astype(np.uint32) << np.uint32(16)).view(np.float32)
        numbers = np.zeros(linear.num_weights, np.uint64)
        numbers[keep] = kept_scale(linear).integers(kept)
        kept_weights[kept_name(linear.name)] = numbers
    return kept_weights
