"""Conversion between blobs and torch tensors of prune masks, votes and pruned matrices.

``espalier.messages.blobs.masks`` and ``espalier.methods.pruning.fedprllm`` describe the blobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from espalier.messages.blobs.masks import kept_name, mask_name
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.plan import BlockPlan
from pruning_kernels.votes.bitmask import Words, unpack
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
    votes : number of votes to prune each weight, with the shape of the weights
    num_voters : number of voters m

    Returns
    -------
    dict of str to Tensor
        float32, with the shapes of the weights (FedPrLLM, section 3.2, step 6).
    """
    return {
        # float32 is exact for any number of voters.
        name: (num_voters - torch.from_numpy(count.astype(np.float32))) / num_voters
        for name, count in votes.items()
    }


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
        # Rounded on the device, so that half the bytes are transferred.
        kept = weight[~prune_mask].to(dtype).cpu()
        rows, columns = weight.shape
        return PrunedMatrix(pack_tensor(prune_mask), (rows, columns), kept)

    @property
    def prune_mask(self) -> Tensor:
        """Prune mask, bool, with the shape of the weights: True = pruned."""
        return torch.from_numpy(unpack(self.words, self.shape))

    def weight(self) -> Tensor:
        """Return the dense matrix, with zeros for pruned weights."""
        dense = torch.zeros(self.shape, dtype=self.kept.dtype)
        dense[~self.prune_mask] = self.kept
        return dense


def pack_kept(matrices: Mapping[str, PrunedMatrix]) -> bytes:
    """Serialize a pruned block from its matrices by canonical name."""
    tensors = {}
    # Sorted, so that equal blocks have equal bytes.
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
