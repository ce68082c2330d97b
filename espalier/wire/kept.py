"""A pruned block as a payload: per matrix a packed prune mask and the weights that were kept, in the model's own dtype.

The kept weights are a flat tensor in the order of the matrix, row by row. Half of the weights in bf16 and the mask
take 9 bits per weight at 50% sparsity; the dense matrix takes 16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.settings.mistakes import Mistake
from espalier.wire.masks import mask_name
from espalier.wire.payload import TensorSpec
from espalier.wire.plan import BlockPlan
from pruning_kernels.bitmask import Words, count, has_clean_padding, num_words, pack, unpack


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


def kept_name(linear: str) -> str:
    """Tensor name of a matrix's kept weights."""
    return f"{linear}.kept"


def kept_specs(block: BlockPlan, num_kept: Mapping[str, int]) -> dict[str, TensorSpec]:
    """The tensors of a pruned block's blob; ``num_kept`` says how many weights each matrix keeps."""
    specs = {mask_name(linear.name): TensorSpec("U64", (num_words(linear.num_weights),)) for linear in block.linears}
    return specs | {kept_name(linear.name): TensorSpec(linear.dtype, (num_kept[linear.name],)) for linear in block.linears}


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
            torch.from_numpy(unpack(tensors[mask_name(linear.name)].numpy(), linear.shape)), tensors[kept_name(linear.name)]
        )
        for linear in block.linears
    }


def require_kept(block: BlockPlan, key: str, blob: bytes) -> dict[str, Words]:
    """The masks of a pruned block whose tensors are as ``kept_specs`` demands them.

    Raises
    ------
    Mistake
        A mask keeps more or fewer weights than there are, has bits beyond the last weight, or a kept weight is not finite.
    """
    tensors, masks = load(blob), {}
    for linear in block.linears:
        words, kept = tensors[mask_name(linear.name)].numpy(), tensors[kept_name(linear.name)]
        if not has_clean_padding(words, linear.num_weights):
            raise Mistake(f"{key} {linear.name}: bits are set beyond the last weight")
        if (pruned := count(words)) != linear.num_weights - kept.numel():
            expected = linear.num_weights - kept.numel()
            raise Mistake(f"{key} {linear.name}: the mask prunes {pruned} weights, the settings ask for {expected}")
        if not bool(torch.isfinite(kept).all()):
            raise Mistake(f"{key} {linear.name}: a kept weight is not finite")
        masks[linear.name] = words
    return masks
