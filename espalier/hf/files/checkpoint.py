"""Safetensors shards, read tensor by tensor and written in a stream; no shard is ever held in memory whole."""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from espalier.environment.bounded_json import read_json
from espalier.errors import Mistake
from espalier.messages.payload import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Dtypes that a model's tensors may have, by safetensors' name; ``dtypes`` has torch's."""
FLOATING = ("F64", "F32", "F16", "BF16")
"""Those that weights can have."""
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
        # A tensor that is in two of them is taken from the last one, as transformers does.
        for shard in self.shards:
            self.tensors.update(_read_header(shard))

    @property
    def is_sharded(self) -> bool:
        """True if an index says which files hold the tensors."""
        return [shard.name for shard in self.shards] != [SINGLE]

    def read(self, name: str) -> "Tensor":
        """Read one tensor into memory of its own (no memory map)."""
        return self.read_into(name, self.room(name))

    def room(self, name: str, pinned: bool = False) -> "Tensor":
        """Room for one tensor; pinned, a CUDA device copies from it while the processor does other work."""
        import torch

        from espalier.hf.files.dtypes import TORCH_DTYPES

        stored = self.tensors[name]
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], pin_memory=pinned)

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Fill the room of one tensor from its file, and return it."""
        return self._fill(name, room, self.tensors[name].stop)

    def _fill(self, name: str, room: "Tensor", stop: int) -> "Tensor":
        """Fill memory with the bytes of a tensor's file that end before ``stop``."""
        import torch

        stored = self.tensors[name]
        waiting = room.view(-1).view(torch.uint8).numpy().data
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

        from espalier.hf.files.dtypes import TORCH_DTYPES

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


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file of a model's weights, or else what says in which files they are: transformers takes the first if both are there."""
ADAPTER = "adapter_config.json"
EXPLICIT = "transformers_weights"
"""File of an adapter that transformers adds to a model; key of ``config.json`` for other weights."""
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Files that may hold weights, which are not read here."""


def _shards(directory: Path) -> list[Path]:
    """Return the files that ``from_pretrained`` reads the weights from."""
    require_plain_weights(directory)
    single = directory / SINGLE
    index = directory / INDEX
    if single.is_file() or not index.is_file():
        if not single.is_file():
            raise Mistake(_no_weights(directory))
        return [single]
    shards = [directory / name for name in _names_in_index(index)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise Mistake(
            f"{index}: names {', '.join(missing)}, and no such file lies there; copy what is"
            " missing"
        )
    return shards


def require_plain_weights(directory: Path) -> None:
    """Refuse a directory in which something makes transformers load other weights than ``model.safetensors``.

    Raises
    ------
    Mistake
        An adapter or shards of distributed training lie there, or ``config.json`` names a file of weights.
    """
    if (directory / ADAPTER).is_file():
        raise Mistake(
            f"{directory}: {ADAPTER} lies beside the model, and transformers would add that adapter"
            " to it; move the adapter to a directory of its own, or merge it into the model"
        )
    if found := sorted(directory.glob("shard-*-model-*-of-*.safetensors")):
        raise Mistake(
            f"{found[0]}: is a shard of distributed training, which transformers would load in"
            f" place of {SINGLE}; move these shards away, or write the model with save_pretrained"
        )
    try:
        named = read_json((directory / "config.json").read_text(encoding="utf-8")).get(EXPLICIT)
    except (OSError, ValueError, AttributeError):
        return  # whoever opens the configuration says what is wrong with it
    if named is not None:
        raise Mistake(
            f"{directory / 'config.json'}: {EXPLICIT} = {named!r}: weights are read from {SINGLE}"
            f" or {INDEX} only; rename the file, and remove the key"
        )


def _names_in_index(index: Path) -> list[str]:
    """Return the names of all shards that an index names, sorted."""
    try:
        document = read_json(index.read_text(encoding="utf-8"))
        names = set(document["weight_map"].values())
        _ = document["metadata"]  # transformers fails without it
    except OSError as error:
        raise Mistake(f"{index}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise Mistake(
            f"{index}: has no key {error.args[0]!r}, as an index of safetensors files has;"
            f" {WRITE_ANEW}"
        ) from None
    except (ValueError, AttributeError, TypeError) as error:
        why = (
            f"is no JSON file ({error})"
            if isinstance(error, ValueError)
            else "has no names of files under weight_map"
        )
        raise Mistake(f"{index}: {why}; copy it again") from None
    if others := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise Mistake(f"{index}: names {others[0]!r}; the files must lie beside it")
    return sorted(names)


WRITE_ANEW = "write the model anew with save_pretrained"


def _no_weights(directory: Path) -> str:
    """Return what is said of a directory without weights that can be read."""
    what = f"{directory}: holds neither {SINGLE} nor {INDEX}"
    found = sorted(path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern))
    if not found:
        return f"{what}; the model must be stored as safetensors (save_pretrained writes it so)"
    files = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    if all(name.endswith(".safetensors") for name in found):
        return (
            f"{what}, but {files}: from_pretrained does not read files of such names; rename a"
            f" single one to {SINGLE}"
        )
    return (
        f"{what}, but {files}; load the model with transformers and write it as safetensors with"
        " save_pretrained"
    )


def _read_header(shard: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Read the names of a file's tensors, and where each lies."""
    size, begun, data = _header_of(shard)
    for name, entry in data.items():
        try:
            dtype = entry["dtype"]
            shape = tuple(entry["shape"])
            start, stop = (begun + offset for offset in entry["data_offsets"])
            known = dtype in DTYPES
            wrong = known and (
                min(shape, default=0) < 0
                or start < begun
                or stop - start != DTYPE_BYTES[dtype] * math.prod(shape)
            )
        except (ValueError, KeyError, TypeError):
            raise Mistake(
                f"{shard}: its header does not say where tensor {name} lies; copy the file again"
            ) from None
        if not known:
            raise Mistake(
                f"{shard}: tensor {name} has dtype {dtype}, which is not read here; convert the"
                " model to one of float32, float16 or bfloat16"
            )
        if wrong:
            raise Mistake(
                f"{shard}: tensor {name}: {stop - start} bytes are no {dtype} {list(shape)}; copy"
                " the file again"
            )
        if stop > size:
            raise Mistake(f"{shard}: ends before tensor {name}; copy the file again")
        yield name, StoredTensor(shard, dtype, shape, start, stop)


MOST_HEADER_BYTES = 100_000_000
"""safetensors reads no longer header either."""


def _header_of(shard: Path) -> tuple[int, int, dict[str, Any]]:
    """Read the size of a file, where its data begin, and its header's entries of tensors."""
    try:
        size = shard.stat().st_size
        with open(shard, "rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            text = file.read(length) if length <= min(size - 8, MOST_HEADER_BYTES) else b""
    except OSError as error:
        raise Mistake(f"{shard}: cannot be read: {error.strerror}") from None
    if not text:
        remedy = _POINTER if first.startswith(b"version ") else "copy the file again"
        raise Mistake(
            f"{shard}: is not a safetensors file: it has {size} bytes, and no header of a known"
            f" length; {remedy}"
        )
    try:
        header = read_json(text)
    except (ValueError, RecursionError) as error:
        raise Mistake(
            f"{shard}: is not a safetensors file: its header is no JSON text ({error}); copy the"
            " file again"
        ) from None
    if not isinstance(header, dict):
        raise Mistake(
            f"{shard}: is not a safetensors file: its header names no tensors; copy the file again"
        )
    header.pop("__metadata__", None)
    return size, 8 + length, header


_POINTER = "it is a pointer of Git LFS in place of the file; fetch the file itself (git lfs pull)"


def shard_header(
    specs: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """What stands before the data of a safetensors file with these tensors; ``specs`` as ``ShardWriter`` takes them."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, size) in specs.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class ShardWriter:
    """Writes a safetensors file tensor by tensor, in the order of the announced specifications."""

    def __init__(
        self,
        file: BinaryIO,
        specs: Mapping[str, tuple[str, tuple[int, ...], int]],
        metadata: Mapping[str, str],
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
            raise ValueError(
                f"expected {self._sizes[expected]} bytes of {expected}, got {len(data)} of {name}"
            )
        self._file.write(data)
