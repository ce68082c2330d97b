"""Safetensors shards, read tensor by tensor and written in a stream; no shard is ever held in memory whole."""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake
from espalier.wire.payload import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Dtypes that a model's tensors may have, by safetensors' name; ``dtypes`` has torch's."""
CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its shard, dtype (safetensors' name), shape, and byte range."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return self.stop - self.start


class Checkpoint:
    """All tensors of a model directory, single-file or sharded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = _shards(directory)
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            self.tensors.update(_read_header(shard))

    def read(self, name: str) -> "Tensor":
        """Read one tensor into memory of its own (no memory map)."""
        return self.read_into(name, self.room(name))

    def room(self, name: str, pinned: bool = False) -> "Tensor":
        """Room for one tensor; pinned, a CUDA device copies from it while the processor does other work."""
        import torch

        from espalier.modeling.dtypes import TORCH_DTYPES

        stored = self.tensors[name]
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], pin_memory=pinned)

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Fill the room of one tensor from its file, and return it."""
        return self._fill(name, room, self.tensors[name].stop)

    def _fill(self, name: str, room: "Tensor", stop: int) -> "Tensor":
        """Fill memory with the bytes of a tensor's file that end before ``stop``."""
        import torch

        stored, waiting = self.tensors[name], room.view(-1).view(torch.uint8).numpy().data
        with open(stored.shard, "rb", buffering=0) as file:
            while waiting:
                read = os.preadv(file.fileno(), [waiting], stop - len(waiting))
                if not read:
                    raise Mistake(f"{stored.shard}: ends before tensor {name}; copy the file again")
                waiting = waiting[read:]
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Rows from ``first`` to before ``last`` of one tensor, in memory of their own."""
        import torch

        from espalier.modeling.dtypes import TORCH_DTYPES

        stored = self.tensors[name]
        room = torch.empty((last - first, *stored.shape[1:]), dtype=TORCH_DTYPES[stored.dtype])
        row_bytes = (stored.stop - stored.start) // max(1, stored.shape[0])
        return self._fill(name, room, stored.start + last * row_bytes)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor, in pieces of at most 16 MiB."""
        stored = self.tensors[name]
        handle = os.open(stored.shard, os.O_RDONLY)
        try:
            for start in range(stored.start, stored.stop, CHUNK):
                size = min(CHUNK, stored.stop - start)
                data = os.pread(handle, size, start)
                if len(data) != size:
                    raise Mistake(f"{stored.shard}: ends before tensor {name}; copy the file again")
                yield data
        finally:
            os.close(handle)


MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as safetensors itself has it."""


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(read_json(index.read_text())["weight_map"].values()))
            if not all(isinstance(name, str) and Path(name).name == name for name in names):  # a file beside it, no other
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Mistake(f"{index}: is not a safetensors index; copy the model again") from None
    else:
        names = ["model.safetensors"]
    shards = [directory / name for name in names]
    for shard in shards:
        if not shard.is_file():
            raise Mistake(f"{shard}: no such file; the model must be stored as safetensors (save_pretrained writes it so)")
    return shards


def _read_header(shard: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = shard.stat().st_size
    try:
        with open(shard, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError
            header = read_json(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] not in DTYPES:
                raise Mistake(f"{shard}: tensor {name} has dtype {entry['dtype']}, which cannot be pruned")
            if stop > size:
                raise Mistake(f"{shard}: ends before tensor {name}; copy the file again")
            stored = StoredTensor(shard, entry["dtype"], tuple(entry["shape"]), start, stop)
            if (
                min(stored.shape, default=0) < 0
                or start < 8 + length
                or stop - start != DTYPE_BYTES[stored.dtype] * math.prod(stored.shape)
            ):
                raise ValueError
            yield name, stored
    except Mistake:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise Mistake(f"{shard}: is not a safetensors file; copy the model again") from None


def shard_header(specs: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data of a safetensors file with these tensors; ``specs`` as ``ShardWriter`` takes them."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, size) in specs.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class ShardWriter:
    """Writes a safetensors file tensor by tensor, in the order of the announced specifications."""

    def __init__(
        self, file: BinaryIO, specs: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
    ) -> None:
        """``specs``: name -> (dtype, shape, number of bytes)."""
        file.write(shard_header(specs, metadata))
        self._file = file
        self._sizes = {name: size for name, (_, _, size) in specs.items()}
        self._order = iter(specs)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write the next tensor's bytes."""
        expected = next(self._order)
        if name != expected or len(data) != self._sizes[name]:
            raise ValueError(f"expected {self._sizes[expected]} bytes of {expected}, got {len(data)} of {name}")
        self._file.write(data)
