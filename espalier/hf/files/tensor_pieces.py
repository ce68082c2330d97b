"""Tensors of a checkpoint in pieces, so that a conversion never holds a tensor twice.

Without the sign bit, the bits of a float, read as an integer, grow with its magnitude. Infinity and
NaN are above all finite numbers.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from espalier.hf.files.checkpoint import Checkpoint

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""torch dtype by safetensors' name."""
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield one tensor in flat pieces of at most 16 MiB, in row-major order and in its own dtype.

    If the rows of a matrix have a multiple of 64 elements, so have all its pieces.
    """
    dtype = TORCH_DTYPES[checkpoint.tensors[name].dtype]
    for chunk in checkpoint.chunks(name):
        yield torch.frombuffer(bytearray(chunk), dtype=dtype)


def converted(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return one tensor in another dtype on a device.

    In addition to the result, only one piece is in memory.
    """
    result = torch.empty(checkpoint.tensors[name].shape, dtype=dtype, device=device)
    flat = result.view(-1)
    start = 0
    for piece in pieces(checkpoint, name):
        flat[start : start + piece.numel()] = piece.to(device)
        start += piece.numel()
    return result


LAYOUTS = {
    "F64": (8, 0x7FF0000000000000),
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
}
"""Size of a number in bytes, and the bits of infinity, by safetensors' name of the dtype."""


def magnitude_bits(dtype: str, data: bytes) -> int:
    """Return the bits of the largest magnitude in a buffer of floats; 0 if the buffer is empty."""
    size, _ = LAYOUTS[dtype]
    numbers = np.frombuffer(data, f"<u{size}")
    # The mask clears the sign bit.
    return int((numbers & numbers.dtype.type((1 << (8 * size - 1)) - 1)).max(initial=0))


def magnitude(dtype: str, bits: int) -> float:
    """Return the magnitude with the given bits; infinity or NaN for bits of no finite number."""
    size, infinity = LAYOUTS[dtype]
    if bits >= infinity:
        return math.inf if bits == infinity else math.nan
    if dtype == "BF16":
        # bfloat16 is the upper half of float32; NumPy has no bfloat16.
        dtype = "F32"
        bits = bits << 16
        size = 4
    return float(np.array([bits], f"<u{size}").view(f"<f{size}")[0])
