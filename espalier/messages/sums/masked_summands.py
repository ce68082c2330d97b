"""Masked summands: packed numbers plus masks, and the place of each tensor in a mask.

A client adds its own mask and one mask for each neighbour: plus towards a neighbour with a larger
number, minus towards one with a smaller number. In the sum of two neighbours their common mask
vanishes (Bonawitz et al. 2017, section 4). Masked numbers are uniform modulo ``2^bits`` whatever
the tensor holds, as long as one of the keys is unknown.
"""

from collections.abc import Mapping

from espalier.messages.sums.summands import (
    WORD_BITS,
    SumSpec,
    SumSpecs,
    Words,
    add_to,
    clear_padding,
)
from espalier.messages.tensor_blobs import TensorSpec
from espalier.secure_sum.masks import WORDS_PER_BLOCK, first_blocks, mask

CHUNK_WORDS = 1 << 17
"""Words of a mask that are in memory at a time."""


def tensor_specs_of(specs: SumSpecs) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors that carry the summands of a reply, by blob key and tensor name."""
    return {
        key: {name: spec.tensor for name, spec in tensors.items()} for key, tensors in specs.items()
    }


def places_in_mask(specs: SumSpecs) -> dict[tuple[str, str], int]:
    """Return the block of a mask with which each tensor begins, by blob key and tensor name."""
    names = [(key, name) for key, tensors in specs.items() for name in tensors]
    sizes = [specs[key][name].num_words for key, name in names]
    return dict(zip(names, first_blocks(sizes), strict=True))


def apply_mask(
    words: Words, spec: SumSpec, key: bytes, first_block: int, *, subtracts: bool = False
) -> None:
    """Add the mask of a key to a packed tensor in place, or subtract it.

    Parameters
    ----------
    first_block : block of the mask with which the tensor begins
    """
    # A chunk holds whole numbers and whole blocks of the mask.
    unit = WORDS_PER_BLOCK * spec.bits
    chunk = max(1, CHUNK_WORDS // unit) * unit
    numbers = chunk * WORD_BITS // spec.bits
    for first in range(0, len(words), chunk):
        first_number = first * WORD_BITS // spec.bits
        chunk_spec = SumSpec(min(numbers, spec.length - first_number), spec.bits)
        mask_words = mask(key, first_block + first // WORDS_PER_BLOCK, chunk_spec.num_words)
        clear_padding(mask_words, chunk_spec)
        add_to(words[first : first + chunk], mask_words, chunk_spec, subtracts=subtracts)


def mask_summand(
    words: Words,
    spec: SumSpec,
    first_block: int,
    client: int,
    own: bytes,
    pairs: Mapping[int, bytes],
) -> None:
    """Add all masks of a client to a packed tensor in place.

    Parameters
    ----------
    own : key of the client's own mask
    pairs : key of the common mask, by number of the neighbour
    """
    apply_mask(words, spec, own, first_block)
    for other, key in pairs.items():
        apply_mask(words, spec, key, first_block, subtracts=other < client)
