"""Prune masks of a block as a payload: flat, one bit per weight (``pruning_kernels.bitmask``)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.settings.mistakes import Mistake
from espalier.wire.payload import pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan, LinearPlan
from pruning_kernels.bitmask import Words, count, count_rows, has_clean_padding, unpack
from pruning_kernels.bitmask_on_device import pack_tensor
from pruning_kernels.selection import pruned_by_group, pruned_in_matrix, pruned_per_group


def mask_name(linear: str) -> str:
    """Tensor name of a matrix's prune mask."""
    return f"{linear}.prune_mask"


def require_exact_sparsity(key: str, linear: LinearPlan, words: Words, sparsity: float, group: str) -> None:
    """Raise Mistake if a mask does not prune exactly its share of each comparison group, or has bits beyond its weights."""
    expected = pruned_in_matrix(linear.shape, sparsity, group)
    if not has_clean_padding(words, linear.num_weights):
        raise Mistake(f"{key} {linear.name}: bits are set beyond the last weight")
    if (pruned := count(words)) != expected:
        raise Mistake(f"{key} {linear.name}: prunes {pruned} weights, the settings ask for {expected}")
    per_group = pruned_per_group(linear.shape, sparsity, group)
    if group != "layer" and (_pruned_by_group(words, linear.shape, group) != per_group).any():
        raise Mistake(f"{key} {linear.name}: a {group} does not prune exactly {per_group} weights")


def _pruned_by_group(words: Words, shape: tuple[int, int], group: str) -> NDArray[np.int64]:
    return count_rows(words, shape) if group == "row" else pruned_by_group(unpack(words, shape), group)


def pack_masks(prune_masks: Mapping[str, Tensor]) -> bytes:
    """Serialise a block's prune masks, bool tensors by canonical linear name."""
    return pack_tensors({mask_name(name): pack_tensor(mask) for name, mask in prune_masks.items()})


def unpack_masks(block: BlockPlan, blob: bytes) -> dict[str, Tensor]:
    """Read a block's prune masks: bool tensors by canonical linear name, shaped like the weights."""
    words = unpack_tensors(blob)
    return {linear.name: torch.from_numpy(unpack(words[mask_name(linear.name)], linear.shape)) for linear in block.linears}
