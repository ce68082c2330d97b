"""Largest magnitude in a piece of a tensor, computed on the bits, without torch.

Without the sign bit, the bits of a float, read as an integer, grow with its magnitude. Infinity and
NaN are above all finite numbers.
"""

import math

import numpy as np

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
