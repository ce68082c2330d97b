"""Largest magnitude of the numbers in a piece of a tensor's bytes; found on their bits, without torch.

Without its sign bit, a float's bits are the larger the larger it is, and infinity and NaN are above all finite numbers.
"""

import math

import numpy as np

LAYOUTS = {
    "F64": (8, 0x7FF0000000000000),
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
}
"""Floating dtypes by safetensors' name: bytes of a number, and the bits of infinity."""


def magnitude_bits(dtype: str, data: bytes) -> int:
    """Return the bits of the largest magnitude among whole numbers of a floating dtype; 0 of none."""
    size, _ = LAYOUTS[dtype]
    numbers = np.frombuffer(data, f"<u{size}")
    return int((numbers & numbers.dtype.type((1 << (8 * size - 1)) - 1)).max(initial=0))


def magnitude(dtype: str, bits: int) -> float:
    """Return the magnitude that bits stand for: NaN or infinity where they are no finite number's."""
    size, infinity = LAYOUTS[dtype]
    if bits >= infinity:
        return math.inf if bits == infinity else math.nan
    if dtype == "BF16":
        dtype = "F32"
        bits = bits << 16
        size = 4
    return float(np.array([bits], f"<u{size}").view(f"<f{size}")[0])
