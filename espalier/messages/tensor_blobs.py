"""Blobs of a message: one safetensors file per decoder block, kept unchanged.

Covers: the work that a sender can cause by the header of a blob. Length, number of entries, digits,
dimensions and names are limited before they are read, or immediately after, so that a header takes
milliseconds whatever its content.
Does not cover: the bytes that Flower itself receives and unpacks before this module sees them, up
to 2 GiB per message.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from espalier.environment.bounded_json import read_json
from espalier.errors import ProtocolError

WIRE_TAGS = {"float32": "F32", "bfloat16": "BF16"}
"""Dtypes in safetensors of the wire dtypes that store a tensor as it is."""
NF4_BLOCK = 64
"""Number of values that share a scale in the wire dtype ``nf4``."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size in bytes of a blob's header; that of a block has a few thousand."""
MAX_TENSORS = 1024
"""Maximum number of tensors in a blob."""
MAX_DIMENSIONS = 8
"""Maximum number of dimensions of a tensor."""
MAX_NAME = 256
"""Maximum number of characters in the name of a tensor."""
TOO_MANY_DIGITS = re.compile(rb"[0-9]{19}")
"""Pattern of a number with more than 18 digits.

No size has as many. The time in which Python reads a number grows with the square of its digits.
"""
MAX_BLOBS = 4096
"""Maximum number of blobs in a message.

Models have about a hundred blocks, each with at most two blobs.
"""
MAX_KEY = 64
"""Maximum number of characters in the key of a blob."""
NUMPY_DTYPES = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "F16": "<f2", "BF16": "<u2", "I16": "<i2", "U16": "<u2",
    "F32": "<f4", "I32": "<i4", "U32": "<u4", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
"""NumPy dtype by safetensors name. NumPy has no bfloat16; its bits are read as uint16."""
SAFETENSORS_ORDER = (
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "F64",
    "I64",
    "U64",
)
"""Dtypes in reverse order of their tensors in a blob; tensors of one dtype are sorted by name."""
DTYPE_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPES.items()}
"""Size of a number in bytes, by safetensors name of its dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one tensor."""

    dtype: str
    """Name of the dtype in safetensors, for instance ``U64``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def pack_tensors(tensors: Mapping[str, NDArray]) -> bytes:
    """Serialize named arrays into one safetensors blob, in sorted order of names."""
    return save({name: np.asarray(tensors[name], order="C") for name in sorted(tensors)})


def unpack_tensors(blob: bytes) -> dict[str, NDArray]:
    """Read the arrays of a safetensors blob with NumPy dtypes.

    Raises
    ------
    ProtocolError
        If it is not a safetensors blob.
    """
    try:
        return load(blob)
    except SafetensorError:
        raise ProtocolError("payload: not a safetensors blob") from None


def views(blob: bytes) -> dict[str, NDArray]:
    """Return read-only views of a blob's tensors, without copying; bfloat16 has its bits as uint16.

    Raises
    ------
    ProtocolError
        See ``tensor_specs``.
    """
    specs = tensor_specs(blob)
    # A blob is the length of the header (8 bytes), the header, and the data.
    start = 8 + struct.unpack("<Q", blob[:8])[0]
    tensors = {}
    for name, spec in specs.items():
        tensors[name] = np.frombuffer(
            blob, NUMPY_DTYPES[spec.dtype], math.prod(spec.shape), start
        ).reshape(spec.shape)
        start += spec.num_bytes
    return tensors


def data_bytes(blob: bytes) -> int:
    """Return the size in bytes of the tensors in a checked blob, without its header."""
    return len(blob) - 8 - int(struct.unpack("<Q", blob[:8])[0])


def packed_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the size in bytes of the blob that ``pack_tensors`` makes of such tensors."""
    order = sorted(
        specs.items(), key=lambda item: (-SAFETENSORS_ORDER.index(item[1].dtype), item[0])
    )
    return 8 + len(_canonical_header(order)) + sum(spec.num_bytes for spec in specs.values())


def tensor_specs(blob: bytes) -> dict[str, TensorSpec]:
    """Read the specs of a blob's tensors from its header.

    Raises
    ------
    ProtocolError
        If the header is not that of a safetensors blob, exceeds the limits of this module, does not
        exactly describe the bytes that follow, or differs from the form that ``pack_tensors``
        writes. Because of the last check it cannot carry metadata or text.
    """
    if len(blob) < 8 or (size := struct.unpack("<Q", blob[:8])[0]) > min(
        MAX_HEADER_BYTES, len(blob) - 8
    ):
        raise ProtocolError("payload: not a safetensors blob (header length)")
    text = blob[8 : 8 + size]
    # Each tensor has one brace and two brackets; the header itself has one brace.
    if TOO_MANY_DIGITS.search(text) or text.count(b"{") + text.count(b"[") > 3 * MAX_TENSORS + 1:
        raise ProtocolError("payload: the safetensors header has too many digits or entries")
    try:
        header = read_json(text)
        _require_small(header)
        specs = {
            str(name): TensorSpec(entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        }
        canonical = _canonical_header(
            sorted(specs.items(), key=lambda item: tuple(header[item[0]]["data_offsets"]))
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtocolError("payload: not a safetensors blob (header entries)") from None
    if text != canonical:
        raise ProtocolError("payload: the safetensors header is not in its one permitted form")
    if sum(spec.num_bytes for spec in specs.values()) != len(blob) - 8 - size:
        raise ProtocolError(
            "payload: the safetensors header does not describe the bytes that follow it"
        )
    return specs


def _require_small(header: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a header has too many tensors or dimensions, or too long a name."""
    if len(header) > MAX_TENSORS:
        raise ValueError("too many tensors")
    if any(
        len(name) > MAX_NAME or len(entry["shape"]) > MAX_DIMENSIONS
        for name, entry in header.items()
    ):
        raise ValueError("too many dimensions, or too long a name")


def locate(file: Path) -> dict[str, tuple[int, TensorSpec]]:
    """Read the header of a file that holds a checked blob.

    Returns
    -------
    dict of str to tuple
        Offset of each tensor's data in the file, in bytes, and its spec.
    """
    with open(file, "rb") as handle:
        size = struct.unpack("<Q", handle.read(8))[0]
        header = read_json(handle.read(size))
    return {
        name: (
            8 + size + entry["data_offsets"][0],
            TensorSpec(entry["dtype"], tuple(entry["shape"])),
        )
        for name, entry in header.items()
    }


def _canonical_header(specs: list[tuple[str, TensorSpec]]) -> bytes:
    """Return the only header that ``pack_tensors`` writes for these tensors in this order.

    It leaves no room for other data.
    """
    header = {}
    offset = 0
    for name, spec in specs:
        if not all(type(size) is int and size >= 0 for size in spec.shape):
            raise ValueError("a shape is not made of sizes")
        stop = offset + spec.num_bytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # safetensors pads the header with blanks to a multiple of 8 bytes.
    return text + b" " * (-len(text) % 8)


def wire_specs(shapes: Mapping[str, tuple[int, ...]], wire_dtype: str) -> dict[str, TensorSpec]:
    """Return the specs of the tensors in a blob that holds adapters of these shapes.

    Parameters
    ----------
    shapes : shapes of the adapter tensors by canonical name
    wire_dtype : dtype of the tensors on the wire
    """
    if wire_dtype != "nf4":
        return {name: TensorSpec(WIRE_TAGS[wire_dtype], shape) for name, shape in shapes.items()}
    specs = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        # Two codes per byte, and one float32 scale per block; both counts are rounded up.
        specs[f"{name}.codes"] = TensorSpec("U8", (-(-size // 2),))
        specs[f"{name}.absmax"] = TensorSpec("F32", (-(-size // NF4_BLOCK),))
    return specs
