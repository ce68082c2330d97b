"""NF4 codes for the wire: 4 bits per value and a float32 per 64 values.

Source: QLoRA (Dettmers et al. 2023), section 3 and appendix E. Values are taken in row-major order,
in blocks of 64; the last block can be shorter. A block is divided by its largest magnitude, and
each value becomes the index of the nearest of 16 levels, which divide a normal distribution into
parts of equal probability. FedSODA calls its quantiser NF4 too, but its equation 1 is another one.

Codes and magnitudes equal those of bitsandbytes on a CPU (``quantize_4bit`` with ``blocksize=64``),
except in a short last block. There bitsandbytes divides instead of multiplying by the reciprocal,
so that a value close to the midpoint of two levels can get the other code. It also stores 1e-38 as
magnitude of a block of zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning_kernels.selection.scores import NotFiniteError

BLOCK = 64
"""Number of values that share a magnitude."""
# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
# fmt: on
"""Levels in the order of their codes, each exact in float32 (QLoRA, appendix E)."""
ZERO = LEVELS.index(0.0)
"""Code of zero, which fills the last byte if the number of values is odd."""
SMALLEST_DIVISOR = 1e-38
"""Smallest magnitude that is used as divisor, as in bitsandbytes.

The reciprocal of smaller magnitudes is not finite in float32.
"""


@dataclass(frozen=True, eq=False)
class Nf4:
    """Values in NF4; ``decode`` checks the format."""

    packed: Tensor
    """(ceil(n / 2),), uint8: codes; value 2 i is in the upper four bits of byte i."""
    absmax: Tensor
    """(ceil(n / 64),), float32: largest magnitude of each block."""


def num_bytes(num_values: int) -> int:
    """Return ``ceil(n / 2) + 4 ceil(n / 64)``, the bytes of n values: 0.5625 per value."""
    return -(-num_values // 2) + 4 * -(-num_values // BLOCK)


def encode(values: Tensor) -> Nf4:
    """Return the NF4 codes of a tensor of any shape and float dtype, after conversion to float32.

    A value exactly at the midpoint of two levels gets the lower one.

    Raises
    ------
    NotFiniteError
        A value is NaN, or infinite in float32.
    """
    flat = values.detach().to(torch.float32).reshape(-1)
    if not bool(torch.isfinite(flat).all()):
        raise NotFiniteError(
            "NaN or infinity has no NF4 code; lower the learning rate or check the data"
        )
    # Pad with zeros to whole blocks; they do not raise a block's magnitude.
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    # Multiply by the reciprocal, as bitsandbytes does; a division can give another code.
    scaled = blocks * absmax.clamp(min=SMALLEST_DIVISOR).reciprocal()[:, None]
    levels = torch.tensor(LEVELS, device=flat.device)
    # Codes are the number of midpoints below the value, so that a midpoint gets the lower level.
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    # (bytes, 2); the padding beyond the last byte is dropped.
    pairs = codes.reshape(-1, 2)[: -(-len(flat) // 2)]
    return Nf4(pairs[:, 0] << 4 | pairs[:, 1], absmax)


def decode(nf4: Nf4, shape: Sequence[int]) -> Tensor:
    """Return the values of NF4 codes: level times magnitude, float32, of the given shape.

    Raises
    ------
    ValueError
        Codes or magnitudes have another dtype or number than the shape needs, a magnitude is
        negative, NaN or infinite, or the unused bits of the last byte differ from those of
        ``encode``.
    """
    # The codes may come from another party: everything is checked before the lookup.
    size = math.prod(shape)
    for name, tensor, dtype, length in (
        ("codes", nf4.packed, torch.uint8, -(-size // 2)),
        ("magnitudes", nf4.absmax, torch.float32, -(-size // BLOCK)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != (length,):
            raise ValueError(
                f"the {name} of {size} values in NF4 are {length} of {dtype}, got"
                f" {tuple(tensor.shape)} of {tensor.dtype}"
            )
    if not bool(((nf4.absmax >= 0) & torch.isfinite(nf4.absmax)).all()):
        raise ValueError(
            "a magnitude of an NF4 block is negative, NaN or infinite; the values are damaged"
        )
    codes = torch.stack([nf4.packed >> 4, nf4.packed & 15], dim=1).reshape(-1)
    # One encoding per value, so that equal values have equal bytes and no bits carry other data.
    if size % 2 and int(codes[-1]) != ZERO:
        raise ValueError(
            "the unused bits of the last NF4 byte are not the code of zero; the values are damaged"
        )
    levels = torch.tensor(LEVELS, device=codes.device)[codes[:size].to(torch.int32)]
    blocks = (
        torch.nn.functional.pad(levels, (0, -size % BLOCK)).reshape(-1, BLOCK) * nf4.absmax[:, None]
    )
    return blocks.reshape(-1)[:size].reshape(tuple(shape))
