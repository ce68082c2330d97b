"""Blobs of a block's masks, one bit per weight, with or without the kept weights.

The kept weights are a flat tensor in row-major order of the matrix, in the dtype of the model's
files. In bfloat16 at 50% sparsity, mask and weights take 9 bits per weight of the matrix; the dense
matrix takes 16.
"""

from collections.abc import Mapping

from numpy.typing import NDArray

from espalier import amounts
from espalier.errors import ProtocolError
from espalier.messages.sums.summands import SumSpec, bits_for
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.models.plan import BlockPlan, LinearPlan
from pruning_kernels.selection.comparison_groups import (
    pruned_by_group,
    pruned_in_matrix,
    pruned_per_group,
)
from pruning_kernels.votes.bitmask import (
    Words,
    count,
    count_rows,
    has_clean_padding,
    num_words,
    unpack,
)


def mask_name(linear: str) -> str:
    """Return the tensor name of the prune mask of a matrix."""
    return f"{linear}.prune_mask"


def votes_name(linear: str) -> str:
    """Return the name of the summand with the votes to prune each weight of a matrix."""
    return f"{linear}.votes"


def votes_specs(block: BlockPlan, num_clients: int) -> dict[str, SumSpec]:
    """Return the specs of a block's votes as summands, in the fewest bits for all clients."""
    bits = bits_for(num_clients)
    return {votes_name(linear.name): SumSpec(linear.num_weights, bits) for linear in block.linears}


def mask_specs(block: BlockPlan) -> dict[str, TensorSpec]:
    """Return the specs of a block's blob of masks: a flat packed mask per matrix."""
    return {
        mask_name(linear.name): TensorSpec("U64", (num_words(linear.num_weights),))
        for linear in block.linears
    }


def require_exact_sparsity(
    key: str, linear: LinearPlan, words: Words, sparsity: float, group: str
) -> None:
    """Check that a mask has exactly the sparsity of the settings in each comparison group.

    Raises ProtocolError if the sparsity differs, or if bits are set after the last weight.

    Parameters
    ----------
    key : key of the blob, for errors
    words : packed mask: 1 = pruned
    sparsity : fraction of the weights that are pruned
    group : comparison group: "layer", "row" or a pattern such as "2:4"
    """
    # The number of pruned weights is fixed, so a client cannot weight its vote by pruning more.
    expected = pruned_in_matrix(linear.shape, sparsity, group)
    if not has_clean_padding(words, linear.num_weights):
        raise ProtocolError(f"{key} {linear.name}: bits are set beyond the last weight")
    # The total first: it is cheap and needs no unpacking.
    if (pruned := count(words)) != expected:
        raise ProtocolError(
            f"{key} {linear.name}: prunes {amounts.count(pruned, 'weight')}, the settings ask for"
            f" {expected}"
        )
    if group == "layer":
        return
    per_group = pruned_per_group(linear.shape, sparsity, group)
    counts = (
        count_rows(words, linear.shape)
        if group == "row"
        else pruned_by_group(unpack(words, linear.shape), group)
    )
    if (counts != per_group).any():
        raise ProtocolError(
            f"{key} {linear.name}: a {group} does not prune exactly {per_group} weights"
        )


EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
"""Exponent bits of a dtype, by its safetensors name."""


def kept_name(linear: str) -> str:
    """Return the tensor name of the kept weights of a matrix."""
    return f"{linear}.kept"


def kept_specs(block: BlockPlan, num_kept: Mapping[str, int]) -> dict[str, TensorSpec]:
    """Return the specs of a pruned block's blob.

    Parameters
    ----------
    num_kept : number of weights that each matrix keeps, by canonical name
    """
    return mask_specs(block) | {
        kept_name(linear.name): TensorSpec(linear.dtype, (num_kept[linear.name],))
        for linear in block.linears
    }


def require_kept(block: BlockPlan, key: str, blob: bytes) -> dict[str, Words]:
    """Check a pruned block whose tensors match ``kept_specs`` and return its packed masks.

    Raises ProtocolError if a mask keeps more or fewer weights than are sent, has bits set after the
    last weight, or a kept weight is not finite.
    """
    tensors = views(blob)
    masks = {}
    for linear in block.linears:
        words = tensors[mask_name(linear.name)]
        kept = tensors[kept_name(linear.name)]
        if not has_clean_padding(words, linear.num_weights):
            raise ProtocolError(f"{key} {linear.name}: bits are set beyond the last weight")
        # Otherwise the weights could not be assigned to places.
        if (pruned := count(words)) != linear.num_weights - kept.size:
            expected = linear.num_weights - kept.size
            raise ProtocolError(
                f"{key} {linear.name}: the mask prunes {amounts.count(pruned, 'weight')}, the"
                f" settings ask for {expected}"
            )
        if not _finite(kept, linear.dtype):
            raise ProtocolError(f"{key} {linear.name}: a kept weight is not finite")
        masks[linear.name] = words
    return masks


def _finite(numbers: NDArray, dtype: str) -> bool:
    """Return True if no number is infinite or NaN, that is, none has all exponent bits set."""
    if dtype not in EXPONENT:
        return True
    # NumPy has no bfloat16, so look at the bits instead of using ``isfinite``.
    bits = numbers.view(f"u{numbers.itemsize}")
    exponent = bits.dtype.type(EXPONENT[dtype])
    return not bool(((bits & exponent) == exponent).any())
