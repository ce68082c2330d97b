"""Pruned matrices as tensors, to and from a block's payload (``espalier.wire.kept``)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.wire.kept import kept_name
from espalier.wire.masks import mask_name
from espalier.wire.plan import BlockPlan
from pruning_kernels.bitmask import pack, unpack


@dataclass(frozen=True)
class PrunedMatrix:
    """One matrix after pruning."""

    prune_mask: Tensor
    """bool, shaped like the weights"""
    kept: Tensor
    """(weights that are kept,), in the dtype of the model's files"""

    @staticmethod
    def of(weight: Tensor, prune_mask: Tensor, dtype: torch.dtype) -> "PrunedMatrix":
        """Take the kept weights out of a matrix, rounded to the model's dtype, before they leave its device."""
        return PrunedMatrix(prune_mask.cpu(), weight[~prune_mask].to(dtype).cpu())

    def weight(self) -> Tensor:
        """The whole matrix, zero where it is pruned."""
        whole = torch.zeros(self.prune_mask.shape, dtype=self.kept.dtype)
        whole[~self.prune_mask] = self.kept
        return whole


def pack_kept(matrices: Mapping[str, PrunedMatrix]) -> bytes:
    """Serialise a pruned block, by canonical linear name."""
    tensors = {}
    for name, matrix in sorted(matrices.items()):
        tensors[mask_name(name)] = torch.from_numpy(pack(matrix.prune_mask.numpy()))
        tensors[kept_name(name)] = matrix.kept
    return save(tensors)


def unpack_kept(block: BlockPlan, blob: bytes) -> dict[str, PrunedMatrix]:
    """Read a pruned block, by canonical linear name."""
    tensors = load(blob)
    return {
        linear.name: PrunedMatrix(
            torch.from_numpy(unpack(tensors[mask_name(linear.name)].numpy(), linear.shape)),
            tensors[kept_name(linear.name)],
        )
        for linear in block.linears
    }
