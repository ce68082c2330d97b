"""A pruned block as a payload: per matrix a packed prune mask and the weights that were kept, in the model's own dtype.

The kept weights are a flat tensor in the order of the matrix, row by row. Half of the weights in bf16 and the mask
take 9 bits per weight at 50% sparsity; the dense matrix takes 16.
"""

from collections.abc import Mapping

from numpy.typing import NDArray

from espalier import amounts
from espalier.settings.mistakes import Mistake
from espalier.wire.masks import mask_name
from espalier.wire.payload import TensorSpec, views
from espalier.wire.plan import BlockPlan
from pruning_kernels.bitmask import Words, count, has_clean_padding, num_words

EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
"""The bits of the exponent, by safetensors' name of a dtype."""


def kept_name(linear: str) -> str:
    """Tensor name of a matrix's kept weights."""
    return f"{linear}.kept"


def kept_specs(block: BlockPlan, num_kept: Mapping[str, int]) -> dict[str, TensorSpec]:
    """The tensors of a pruned block's blob; ``num_kept`` says how many weights each matrix keeps."""
    specs = {
        mask_name(linear.name): TensorSpec("U64", (num_words(linear.num_weights),))
        for linear in block.linears
    }
    return specs | {
        kept_name(linear.name): TensorSpec(linear.dtype, (num_kept[linear.name],))
        for linear in block.linears
    }


def require_kept(block: BlockPlan, key: str, blob: bytes) -> dict[str, Words]:
    """The masks of a pruned block whose tensors are as ``kept_specs`` demands them.

    Raises
    ------
    Mistake
        A mask keeps more or fewer weights than there are, has bits beyond the last weight, or a kept weight is not finite.
    """
    tensors = views(blob)
    masks = {}
    for linear in block.linears:
        words = tensors[mask_name(linear.name)]
        kept = tensors[kept_name(linear.name)]
        if not has_clean_padding(words, linear.num_weights):
            raise Mistake(f"{key} {linear.name}: bits are set beyond the last weight")
        if (pruned := count(words)) != linear.num_weights - kept.size:
            expected = linear.num_weights - kept.size
            raise Mistake(
                f"{key} {linear.name}: the mask prunes {amounts.count(pruned, 'weight')}, the"
                f" settings ask for {expected}"
            )
        if not _finite(kept, linear.dtype):
            raise Mistake(f"{key} {linear.name}: a kept weight is not finite")
        masks[linear.name] = words
    return masks


def _finite(numbers: NDArray, dtype: str) -> bool:
    """Whether no number is infinite or NaN: none has all bits of its exponent set."""
    if dtype not in EXPONENT:
        return True
    bits = numbers.view(f"u{numbers.itemsize}")
    exponent = bits.dtype.type(EXPONENT[dtype])
    return not bool(((bits & exponent) == exponent).any())
