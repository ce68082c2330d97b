"""Payloads: one safetensors blob per decoder block, carried unchanged in a Flower ``Array``."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from espalier.settings.mistakes import Mistake

STYPE = "safetensors"
MAX_HEADER_BYTES = 16 * 1024 * 1024
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Dtype (safetensors' name, for instance ``U64``) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def pack_tensors(tensors: Mapping[str, NDArray]) -> bytes:
    """Serialise named arrays into one safetensors blob, in sorted order of names."""
    return save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)})


def unpack_tensors(blob: bytes) -> dict[str, NDArray]:
    """Read a safetensors blob of NumPy dtypes."""
    try:
        return load(blob)
    except SafetensorError as error:
        raise Mistake(f"payload: not a safetensors blob ({error})") from None


def tensor_specs(blob: bytes) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of a blob, read from its header alone.

    Raises
    ------
    Mistake
        The header is not that of a safetensors blob, carries metadata, or does not describe the bytes that follow exactly.
    """
    if len(blob) < 8 or (size := struct.unpack("<Q", blob[:8])[0]) > min(MAX_HEADER_BYTES, len(blob) - 8):
        raise Mistake("payload: not a safetensors blob (header length)")
    try:
        header = json.loads(blob[8 : 8 + size])
        specs = {str(name): TensorSpec(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        expected = sum(spec.num_bytes for spec in specs.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Mistake("payload: not a safetensors blob (header entries)") from None
    starts_where_last_ended = all(a[1] == b[0] for a, b in zip([(0, 0), *spans], spans, strict=False))
    if not starts_where_last_ended or expected != len(blob) - 8 - size or (spans and spans[-1][1] != expected):
        raise Mistake("payload: the safetensors header does not describe the bytes that follow it")
    return specs


def block_key(index: int) -> str:
    """Name of a decoder block's blob in a message."""
    return f"block-{index:04d}"


def to_record(blobs: Mapping[str, bytes]) -> ArrayRecord:
    """Put blobs into a Flower record."""
    return ArrayRecord({key: Array(dtype="", shape=(), stype=STYPE, data=blob) for key, blob in blobs.items()})


def from_record(record: ArrayRecord) -> dict[str, bytes]:
    """Take blobs out of a Flower record.

    Raises
    ------
    Mistake
        An array is of another serialisation.
    """
    for key, array in record.items():
        if array.stype != STYPE or array.dtype or tuple(array.shape):
            raise Mistake(f"payload {str(key)[:64]!r}: serialisation is not '{STYPE}'")
    return {key: array.data for key, array in record.items()}
