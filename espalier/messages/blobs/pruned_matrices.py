"""Conversion between blobs and torch tensors of pruned matrices (``espalier.messages.blobs.kept_weights``)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.messages.blobs.kept_weights import kept_name
from espalier.messages.blobs.masks import mask_name
from espalier.models.plan import BlockPlan
from pruning_kernels.votes.bitmask import pack, unpack


@dataclass(frozen=True)
class PrunedMatrix:
    """Matrix after pruning."""

    prune_mask: Tensor
    """bool, with the shape of the weights: True = pruned."""
    kept: Tensor
    """Kept weights in row-major order, (kept,), in the dtype of the model's files."""

    @staticmethod
    def of(weight: Tensor, prune_mask: Tensor, dtype: torch.dtype) -> "PrunedMatrix":
        """Return a pruned matrix, whose weights are rounded to ``dtype`` on their device."""
        return PrunedMatrix(prune_mask.cpu(), weight[~prune_mask].to(dtype).cpu())

    def weight(self) -> Tensor:
        """Return the dense matrix, with zeros for pruned weights."""
        whole = torch.zeros(self.prune_mask.shape, dtype=self.kept.dtype)
        whole[~self.prune_mask] = self.kept
        return whole


def pack_kept(matrices: Mapping[str, PrunedMatrix]) -> bytes:
    """Serialize a pruned block from its matrices by canonical name."""
    tensors = {}
    for name, matrix in sorted(matrices.items()):
        tensors[mask_name(name)] = torch.from_numpy(pack(matrix.prune_mask.numpy()))
        tensors[kept_name(name)] = matrix.kept
    return save(tensors)


def unpack_kept(block: BlockPlan, blob: bytes) -> dict[str, PrunedMatrix]:
    """Read the matrices of a pruned block by canonical name."""
    tensors = load(blob)
    return {
        linear.name: PrunedMatrix(
            torch.from_numpy(unpack(tensors[mask_name(linear.name)].numpy(), linear.shape)),
            tensors[kept_name(linear.name)],
        )
        for linear in block.linears
    }
