"""Safetensors shards, read tensor by tensor and written as a stream.

No shard is ever in memory completely.

The thread fills memory that its owner allocated and does nothing else; it launches no work on a
device. Read errors are raised when the tensor is taken.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import Tensor

from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.messages.tensor_blobs import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor


DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Allowed dtypes of a model's tensors, by safetensors' name; ``tensor_pieces`` has those of torch."""
FLOATING = ("F64", "F32", "F16", "BF16")
"""Allowed dtypes of weights."""
CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: its shard, dtype (safetensors' name), shape and byte range."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return self.stop - self.start


class Checkpoint:
    """All tensors of a model directory with a single weight file or several shards.

    Raises
    ------
    InputError
        The weight files are missing, damaged or of an unsupported kind.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = _shards(directory)
        self.tensors: dict[str, StoredTensor] = {}
        # A tensor that is in two shards is read from the last one, as in transformers.
        for shard in self.shards:
            self.tensors.update(_read_header(shard))

    @property
    def is_sharded(self) -> bool:
        """True if an index names the files that hold the tensors."""
        return [shard.name for shard in self.shards] != [SINGLE]

    def read(self, name: str) -> "Tensor":
        """Read one tensor into new memory, without a memory map."""
        return self.read_into(name, self.room(name))

    def room(self, name: str, pinned: bool = False) -> "Tensor":
        """Allocate memory for one tensor.

        With ``pinned`` a CUDA device can copy from it while the CPU does other work.
        """
        import torch

        from espalier.hf.files.tensor_pieces import TORCH_DTYPES

        stored = self.tensors[name]
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], pin_memory=pinned)

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor from its file into ``room``, and return it."""
        return self._fill(name, room, self.tensors[name].stop)

    def _fill(self, name: str, room: "Tensor", stop: int) -> "Tensor":
        """Fill memory with bytes of a tensor's file, up to the offset ``stop`` (exclusive)."""
        import torch

        stored = self.tensors[name]
        waiting = room.view(-1).view(torch.uint8).numpy().data
        with open(stored.shard, "rb", buffering=0) as file:
            while waiting:
                # One call may read less than requested.
                read = os.preadv(file.fileno(), [waiting], stop - len(waiting))
                if not read:
                    raise InputError(
                        f"{stored.shard}: ends before tensor {name}; copy the file again"
                    )
                waiting = waiting[read:]
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive) of one tensor into new memory."""
        import torch

        from espalier.hf.files.tensor_pieces import TORCH_DTYPES

        stored = self.tensors[name]
        room = torch.empty((last - first, *stored.shape[1:]), dtype=TORCH_DTYPES[stored.dtype])
        row_bytes = (stored.stop - stored.start) // max(1, stored.shape[0])
        return self._fill(name, room, stored.start + last * row_bytes)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB."""
        stored = self.tensors[name]
        handle = os.open(stored.shard, os.O_RDONLY)
        try:
            for start in range(stored.start, stored.stop, CHUNK):
                size = min(CHUNK, stored.stop - start)
                data = os.pread(handle, size, start)
                if len(data) != size:
                    raise InputError(
                        f"{stored.shard}: ends before tensor {name}; copy the file again"
                    )
                yield data
        finally:
            os.close(handle)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index that names the weight files of a sharded model.

If both ``SINGLE`` and the index exist, transformers reads ``SINGLE``.
"""
ADAPTER = "adapter_config.json"
EXPLICIT = "transformers_weights"
"""Key of ``config.json`` that names another weight file."""
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Name patterns of weight files that are not read here."""


def _shards(directory: Path) -> list[Path]:
    """Return the files from which ``from_pretrained`` reads the weights."""
    require_plain_weights(directory)
    single = directory / SINGLE
    index = directory / INDEX
    # transformers prefers the single file if both exist.
    if single.is_file() or not index.is_file():
        if not single.is_file():
            raise InputError(_no_weights(directory))
        return [single]
    shards = [directory / name for name in _names_in_index(index)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise InputError(
            f"{index}: names {', '.join(missing)}, but these files do not exist; copy what is"
            " missing"
        )
    return shards


def require_plain_weights(directory: Path) -> None:
    """Refuse a directory from which transformers would load other weights.

    Raises
    ------
    InputError
        The directory holds an adapter or shards of distributed training, or ``config.json`` names a
        weight file.
    """
    if (directory / ADAPTER).is_file():
        raise InputError(
            f"{directory}: {ADAPTER} is in the directory of the model, and transformers would"
            " add that adapter to the model; move the adapter to its own directory, or merge it"
            " into the model"
        )
    if found := sorted(directory.glob("shard-*-model-*-of-*.safetensors")):
        raise InputError(
            f"{found[0]}: is a shard of distributed training, which transformers would load"
            f" instead of {SINGLE}; move these shards away, or write the model with"
            " save_pretrained"
        )
    try:
        named = read_json((directory / "config.json").read_text(encoding="utf-8")).get(EXPLICIT)
    except (OSError, ValueError, AttributeError):
        # Code that opens the configuration reports what is wrong with it.
        return
    if named is not None:
        raise InputError(
            f"{directory / 'config.json'}: {EXPLICIT} = {named!r}: weights are read only from"
            f" {SINGLE} or {INDEX}; rename the file, and remove the key"
        )


def _names_in_index(index: Path) -> list[str]:
    """Return the sorted names of all shards in an index."""
    try:
        document = read_json(index.read_text(encoding="utf-8"))
        names = set(document["weight_map"].values())
        # transformers fails without the key "metadata".
        _ = document["metadata"]
    except OSError as error:
        raise InputError(f"{index}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise InputError(
            f"{index}: has no key {error.args[0]!r}, which an index of safetensors files needs;"
            f" {WRITE_ANEW}"
        ) from None
    except (ValueError, AttributeError, TypeError) as error:
        why = (
            f"is not a JSON file ({error})"
            if isinstance(error, ValueError)
            else "has no file names in weight_map"
        )
        raise InputError(f"{index}: {why}; copy it again") from None
    if others := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise InputError(
            f"{index}: names {others[0]!r}; the files must be in the directory of the index"
        )
    return sorted(names)


WRITE_ANEW = "write the model again with save_pretrained"


def _no_weights(directory: Path) -> str:
    """Return the error message for a directory without readable weights."""
    what = f"{directory}: contains neither {SINGLE} nor {INDEX}"
    found = sorted(path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern))
    if not found:
        return f"{what}; the model must be stored as safetensors (save_pretrained does this)"
    files = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    if all(name.endswith(".safetensors") for name in found):
        return (
            f"{what}, but {files}: from_pretrained does not read files with such names; if there"
            f" is only one, rename it to {SINGLE}"
        )
    return (
        f"{what}, but {files}; load the model with transformers and write it as safetensors with"
        " save_pretrained"
    )


def _read_header(shard: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and the location of each tensor of a file."""
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
            raise InputError(
                f"{shard}: the header does not say where tensor {name} is; copy the file again"
            ) from None
        if not known:
            raise InputError(
                f"{shard}: tensor {name} has the unsupported dtype {dtype}; convert the model to"
                " float32, float16 or bfloat16"
            )
        if wrong:
            raise InputError(
                f"{shard}: tensor {name}: {stop - start} bytes do not match {dtype}"
                f" {list(shape)}; copy the file again"
            )
        if stop > size:
            raise InputError(f"{shard}: ends before tensor {name}; copy the file again")
        yield name, StoredTensor(shard, dtype, shape, start, stop)


MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header in bytes, the limit of the safetensors library."""


def _header_of(shard: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the size of a file, the offset of its data, and the header's entries of tensors."""
    try:
        size = shard.stat().st_size
        with open(shard, "rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            # A damaged file may claim any length, so it is checked before memory is allocated.
            text = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise InputError(f"{shard}: cannot be read: {error.strerror}") from None
    if not text:
        remedy = _POINTER if first.startswith(b"version ") else "copy the file again"
        raise InputError(
            f"{shard}: is not a safetensors file: it has {size} bytes, and no header of a known"
            f" length; {remedy}"
        )
    try:
        header = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{shard}: is not a safetensors file: its header is not JSON ({error}); copy the"
            " file again"
        ) from None
    if not isinstance(header, dict):
        raise InputError(
            f"{shard}: is not a safetensors file: its header names no tensors; copy the file again"
        )
    header.pop("__metadata__", None)
    return size, 8 + length, header


_POINTER = "it is a Git LFS pointer instead of the file; fetch the file with: git lfs pull"


def shard_header(
    specs: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before the data of a safetensors file with these tensors.

    Parameters
    ----------
    specs : name -> (safetensors dtype, shape, number of bytes), in file order
    metadata : content of ``__metadata__``; empty for none
    """
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
    # Padding with spaces aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class ShardWriter:
    """Writer of a safetensors file, tensor by tensor, in the order of the given specifications.

    Parameters
    ----------
    file : open binary file
    specs : name -> (safetensors dtype, shape, number of bytes)
    metadata : content of ``__metadata__``
    """

    def __init__(
        self,
        file: BinaryIO,
        specs: Mapping[str, tuple[str, tuple[int, ...], int]],
        metadata: Mapping[str, str],
    ) -> None:
        file.write(shard_header(specs, metadata))
        self._file = file
        self._sizes = {name: size for name, (_, _, size) in specs.items()}
        self._order = iter(specs)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write the bytes of the next tensor.

        Raises
        ------
        ValueError
            The tensor is not the next one, or has another size.
        """
        expected = next(self._order)
        if name != expected or len(data) != self._sizes[name]:
            raise ValueError(
                f"expected {self._sizes[expected]} bytes of {expected}, but got {len(data)} of"
                f" {name}"
            )
        self._file.write(data)


class ReadingAhead:
    """Reader of tensors in order, into pinned memory if a CUDA device will copy them.

    Parameters
    ----------
    checkpoint : source of the tensors
    pinned : True if a CUDA device will copy the tensors
    """

    def __init__(self, checkpoint: Checkpoint, pinned: bool) -> None:
        self._checkpoint = checkpoint
        self._pinned = pinned
        self._thread = ThreadPoolExecutor(1, "reading-ahead")
        self._begun: dict[str, Future[Tensor]] = {}

    def begin(self, names: Sequence[str]) -> None:
        """Start reading these tensors, and drop earlier ones that were not taken."""
        for tensor in self._begun.values():
            tensor.cancel()
        wait(self._begun.values())
        self._begun = {}
        for name in names:
            # Pinned memory is allocated here, because the thread must not use the device.
            room = self._checkpoint.room(name, self._pinned)
            self._begun[name] = self._thread.submit(self._checkpoint.read_into, name, room)

    def take(self, name: str) -> Tensor:
        """Return one tensor when it is read; a tensor that was not requested is read now.

        Raises
        ------
        InputError
            The file is too short.
        OSError
            Reading failed.
        """
        begun = self._begun.pop(name, None)
        return begun.result() if begun else self._checkpoint.read(name)
