"""Conversion between blobs and torch tensors of prune masks and votes.

``espalier.messages.blobs.masks`` and ``espalier.methods.fedprllm`` describe the blobs.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.messages.blobs.masks import mask_name
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.plan import BlockPlan
from pruning_kernels.votes.bitmask import unpack
from pruning_kernels.votes.bitmask_on_device import pack_tensor


def pack_masks(prune_masks: Mapping[str, Tensor]) -> bytes:
    """Serialize a block's prune masks, which are bool tensors by canonical name of their matrix."""
    return pack_tensors({mask_name(name): pack_tensor(mask) for name, mask in prune_masks.items()})


def unpack_masks(block: BlockPlan, blob: bytes) -> dict[str, Tensor]:
    """Read a block's prune masks: bool tensors shaped like the weights, by canonical name."""
    words = unpack_tensors(blob)
    return {
        linear.name: torch.from_numpy(unpack(words[mask_name(linear.name)], linear.shape))
        for linear in block.linears
    }


def kept_shares(votes: Mapping[str, NDArray], num_voters: int) -> dict[str, Tensor]:
    """Return the fraction of voters that keep each weight, ``(m - votes) / m``, by canonical name.

    Parameters
    ----------
    votes
        Number of votes to prune each weight, with the shape of the weights.
    num_voters
        Number of voters m.

    Returns
    -------
    dict of str to Tensor
        float32, with the shapes of the weights (FedPrLLM, section 3.2, step 6).
    """
    return {
        name: (num_voters - torch.from_numpy(count.astype(np.float32))) / num_voters
        for name, count in votes.items()
    }
