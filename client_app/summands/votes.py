"""Votes and kept weights as summands.

Each vote is 0 or 1 in the fewest bits that hold the number of clients, so that their sum is the count
that the server makes of masks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from client_app.site import Site
from espalier.messages.blobs.masks import kept_name, mask_name, votes_name
from espalier.messages.message import MessageBody
from espalier.messages.summands import Numbers
from espalier.messages.tensor_blobs import views
from espalier.methods.fedspallm import FedSpaLLMSettings, kept_scale
from espalier.models.plan import BlockPlan
from pruning_kernels.votes.bitmask import unpack


def of_masks(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the votes of each block of a reply with masks (FedPrLLM)."""
    for key, blob in blobs.items():
        yield key, votes_in(site.model.plan.block(key), blob)


def of_kept(
    site: Site, request: MessageBody, report: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> Iterator[tuple[str, Mapping[str, Numbers]]]:
    """Yield the votes and, if clients change weights, the kept weights of each layer (FedSpaLLM).

    A pruned weight adds zero. Kept weights are clipped by the largest weight of the dense matrix
    (``kept_scale``).
    """
    changes = site.settings.of(FedSpaLLMSettings).changes_weights
    for key, blob in blobs.items():
        block = site.model.plan.block(key)
        found = votes_in(block, blob)
        if changes:
            found |= _kept_in(site, block, blob)
        yield key, found


def votes_in(block: BlockPlan, blob: bytes) -> dict[str, Numbers]:
    """Return the votes to prune each weight, 0 or 1, by tensor name: (num_weights,) uint64."""
    masks = views(blob)
    return {
        votes_name(linear.name): unpack(
            masks[mask_name(linear.name)], (linear.num_weights,)
        ).astype(np.uint64)
        for linear in block.linears
    }


def _kept_in(site: Site, block: BlockPlan, blob: bytes) -> dict[str, Numbers]:
    """Return the kept weights of a block in fixed point, with zeros at pruned places."""
    from espalier.messages.blobs.mask_tensors import unpack_kept

    found = {}
    for name, matrix in unpack_kept(block, blob).items():
        linear = block.linear(name)
        largest = site.model.checkpoint.read(linear.parameter).abs().max().item()
        scale = kept_scale(linear, largest)
        whole = np.zeros(linear.num_weights, np.uint64)
        keep = ~unpack(matrix.words, (linear.num_weights,))
        whole[keep] = scale.integers(matrix.kept.to(torch.float32))
        found[kept_name(name)] = whole
    return found
