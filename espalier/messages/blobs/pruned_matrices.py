"""Conversion between blobs and torch tensors of pruned matrices (``espalier.messages.blobs.kept_weights``)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.messages.blobs.kept_weights import kept_name
from espalier.messages.blobs.masks import mask_name
from espalier.models.plan import BlockPlan
from pruning_kernels.votes.bitmask import Words, unpack
from pruning_kernels.votes.bitmask_on_device import pack_tensor


@dataclass(frozen=True)
class PrunedMatrix:
    """Matrix after pruning."""

    words: Words
    """Packed prune mask: 1 = pruned."""
    shape: tuple[int, int]
    """Shape of the weights."""
    kept: Tensor
    """Kept weights in row-major order, (kept,), in the dtype of the model's files."""

    @staticmethod
    def of(weight: Tensor, prune_mask: Tensor, dtype: torch.dtype) -> "PrunedMatrix":
        """Return a pruned matrix, whose weights are rounded to ``dtype`` on their device."""
        kept = weight[~prune_mask].to(dtype).cpu()
        rows, columns = weight.shape
        return PrunedMatrix(pack_tensor(prune_mask), (rows, columns), kept)

    @property
    def prune_mask(self) -> Tensor:
        """Prune mask, bool, with the shape of the weights: True = pruned."""
        return torch.from_numpy(unpack(self.words, self.shape))

    def weight(self) -> Tensor:
        """Return the dense matrix, with zeros for pruned weights."""
        whole = torch.zeros(self.shape, dtype=self.kept.dtype)
        whole[~self.prune_mask] = self.kept
        return whole


def pack_kept(matrices: Mapping[str, PrunedMatrix]) -> bytes:
    """Serialize a pruned block from its matrices by canonical name."""
    tensors = {}
    for name, matrix in sorted(matrices.items()):
        tensors[mask_name(name)] = torch.from_numpy(matrix.words)
        tensors[kept_name(name)] = matrix.kept
    return save(tensors)


def unpack_kept(block: BlockPlan, blob: bytes) -> dict[str, PrunedMatrix]:
    """Read the matrices of a pruned block by canonical name."""
    tensors = load(blob)
    return {
        linear.name: PrunedMatrix(
            tensors[mask_name(linear.name)].numpy(), linear.shape, tensors[kept_name(linear.name)]
        )
        for linear in block.linears
    }
