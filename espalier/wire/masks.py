"""Prune masks of a block as a payload: flat, one bit per weight (``pruning_kernels.bitmask``)."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from espalier.wire.payload import pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan
from pruning_kernels.bitmask import pack, unpack


def mask_name(linear: str) -> str:
    """Tensor name of a matrix's prune mask."""
    return f"{linear}.prune_mask"


def pack_masks(prune_masks: Mapping[str, Tensor]) -> bytes:
    """Serialise a block's prune masks, bool tensors by canonical linear name."""
    return pack_tensors({mask_name(name): pack(mask.cpu().numpy().astype(np.bool_)) for name, mask in prune_masks.items()})


def unpack_masks(block: BlockPlan, blob: bytes) -> dict[str, Tensor]:
    """Read a block's prune masks: bool tensors by canonical linear name, shaped like the weights."""
    words = unpack_tensors(blob)
    return {linear.name: torch.from_numpy(unpack(words[mask_name(linear.name)], linear.shape)) for linear in block.linears}
