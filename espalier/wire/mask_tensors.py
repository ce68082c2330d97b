"""Prune masks and votes as tensors, to and from payloads (``espalier.wire.masks``, ``espalier.wire.fedprllm``)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.wire.masks import mask_name
from espalier.wire.payload import pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan
from pruning_kernels.bitmask import unpack
from pruning_kernels.bitmask_on_device import pack_tensor


def pack_masks(prune_masks: Mapping[str, Tensor]) -> bytes:
    """Serialise a block's prune masks, bool tensors by canonical linear name."""
    return pack_tensors({mask_name(name): pack_tensor(mask) for name, mask in prune_masks.items()})


def unpack_masks(block: BlockPlan, blob: bytes) -> dict[str, Tensor]:
    """Read a block's prune masks: bool tensors by canonical linear name, shaped like the weights."""
    words = unpack_tensors(blob)
    return {
        linear.name: torch.from_numpy(unpack(words[mask_name(linear.name)], linear.shape))
        for linear in block.linears
    }


def kept_shares(votes: Mapping[str, NDArray], num_voters: int) -> dict[str, Tensor]:
    """``(m - votes) / m`` per weight, by canonical linear name: float32, shaped like the weights (FedPrLLM 3.2, step 6)."""
    return {
        name: (num_voters - torch.from_numpy(count.astype(np.float32))) / num_voters
        for name, count in votes.items()
    }
