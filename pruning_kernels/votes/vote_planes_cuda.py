"""Vote counting on a CUDA device by carry-save addition, in Triton.

One program adds a tile of words of all voters. The planes of the tile stay in registers until the
last voter, so that every mask is read once from device memory and every plane is written once,
which is the minimum. As on the CPU (``carry_save``), seven full adders turn eight masks into four
planes, and masks are not unpacked.

Triton is part of torch's builds for CUDA. ``device_votes`` imports this module only on such a
device. The upper planes are a tuple of tensors that is carried through a loop, which needs Triton
3.3 (torch 2.7).
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 256
"""Number of words per program: two per thread, with loads of 16 bytes per mask."""
WARPS = 4


def count_votes(masks: Tensor, planes: Tensor) -> None:
    """Count the votes of masks into planes.

    Parameters
    ----------
    masks : (voters, words), int64 on a CUDA device, with contiguous rows
    planes : (bits of the number of voters, words), int64 on the same device; overwritten. Rows can
        have any distance, as in a slice of all planes.
    """
    voters, words = masks.shape
    programs = (triton.cdiv(words, TILE),)
    _count_tile[programs](
        masks, planes, voters, words, planes.stride(0), len(planes), TILE, num_warps=WARPS
    )


@triton.jit
def _count_tile(
    masks: tl.tensor,
    planes: tl.tensor,
    voters: tl.tensor,
    words: tl.tensor,
    stride: tl.tensor,
    num_planes: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add up one tile.

    The lowest three planes are named variables; further planes, for more than seven voters, are in
    ``upper``.
    """
    # int64, because voters times words can exceed 32 bits.
    place = tl.cast(tl.program_id(0), tl.int64) * tile + tl.arange(0, tile)
    end = tl.cast(voters, tl.int64) * words
    ones = tl.zeros([tile], tl.int64)
    twos = ones
    fours = ones
    upper = (ones,)
    for _ in tl.static_range(num_planes - 4):
        # Tuples of Triton have no unpacking, and before Triton 3.6 no product.
        upper = upper + (ones,)  # type: ignore[assignment]  # noqa: RUF005
    # Four pairs of masks per step: the carries of eight masks meet in one.
    for voter in range(0, voters, 8):
        ones, twos_a = _add_two(ones, masks, voter, end, words, place)
        ones, twos_b = _add_two(ones, masks, voter + 2, end, words, place)
        ones, twos_c = _add_two(ones, masks, voter + 4, end, words, place)
        ones, twos_d = _add_two(ones, masks, voter + 6, end, words, place)
        twos, fours_a = _full_add(twos, twos_a, twos_b)
        twos, fours_b = _full_add(twos, twos_c, twos_d)
        fours, carry = _full_add(fours, fours_a, fours_b)
        added = upper[:0]
        # The carry of weight 8 ripples through the upper planes.
        for plane in tl.static_range(len(upper)):
            added = added + (upper[plane] ^ carry,)  # type: ignore[assignment]  # noqa: RUF005
            carry = upper[plane] & carry
        upper = added  # type: ignore[assignment]
    lowest = (ones, twos, fours)
    for plane in tl.static_range(num_planes):
        tl.store(
            planes + plane * tl.cast(stride, tl.int64) + place,
            (lowest + upper)[plane],
            mask=place < words,
        )


@triton.jit
def _add_two(
    ones: tl.tensor,
    masks: tl.tensor,
    voter: tl.tensor,
    end: tl.tensor,
    words: tl.tensor,
    place: tl.tensor,
) -> tl.tensor:
    """Add the masks of two voters to a plane.

    Masks after the last one, which ends at ``end``, count as zero.
    """
    at = tl.cast(voter, tl.int64) * words + place
    first = tl.load(masks + at, mask=(place < words) & (at < end), other=0)
    second = tl.load(masks + at + words, mask=(place < words) & (at + words < end), other=0)
    return _full_add(ones, first, second)


@triton.jit
def _full_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Return sum and carry of three words, bit by bit."""
    differ = a ^ b
    return differ ^ c, (a & b) | (differ & c)
