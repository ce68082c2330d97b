"""Safetensors files of a model, read tensor by tensor and written as a stream.

No file is ever in memory completely. Opening does not import torch.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from espalier.environment.hub_models import ADAPTER, INDEX, SINGLE, WRITE_AGAIN, shard_names
from espalier.errors import EspalierError, InputError
from espalier.messages.tensor_blobs import TensorSpec
from espalier.storage.atomic import replacing

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Allowed dtypes of a model's tensors, by safetensors' name."""
FLOATING = ("F64", "F32", "F16", "BF16")
"""Allowed dtypes of weights."""
STORED_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""safetensors' name of the dtypes of weights that a configuration or a user can name."""
CHUNK = 16 * 1024 * 1024

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Name patterns of weight files that are not read here."""


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """Dtype, shape and location of a tensor."""

    shard: Path
    start: int = 0
    """Offset of the data in the shard, in bytes."""


class Checkpoint:
    """All tensors of a model directory with a single weight file or several shards.

    Raises InputError if the weight files are missing, damaged or of an unsupported kind.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = _shards(directory)
        self.tensors: dict[str, StoredTensor] = {}
        # A tensor that is in two shards is read from the last one, as in transformers.
        for shard in self.shards:
            self.tensors.update(_read_header(shard))

    @property
    def as_written(self) -> "Checkpoint":
        """Tensors under the names that an export has."""
        return self

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

        from espalier.hf.files.dtypes import TORCH_DTYPES

        stored = self.tensors[name]
        return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], pin_memory=pinned)

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor from its file into ``room``, and return it."""
        return self._fill(name, room, self.tensors[name].start)

    def _fill(self, name: str, room: "Tensor", start: int) -> "Tensor":
        """Fill memory with bytes of a tensor's file, from the offset ``start`` on."""
        import torch

        shard = self.tensors[name].shard
        # A view of the tensor's memory, so that reading needs no second copy.
        data = room.view(-1).view(torch.uint8).numpy().data
        with open(shard, "rb") as file:
            file.seek(start)
            # A truncated file would leave uninitialised memory.
            if file.readinto(data) != len(data):
                raise _too_short(shard, name)
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive) of one tensor into new memory."""
        import torch

        from espalier.hf.files.dtypes import TORCH_DTYPES

        stored = self.tensors[name]
        room = torch.empty((last - first, *stored.shape[1:]), dtype=TORCH_DTYPES[stored.dtype])
        # Rows follow each other in the file.
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        return self._fill(name, room, stored.start + first * row_bytes)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB."""
        stored = self.tensors[name]
        with open(stored.shard, "rb") as file:
            file.seek(stored.start)
            for remaining in range(stored.num_bytes, 0, -CHUNK):
                data = file.read(min(CHUNK, remaining))
                if len(data) < min(CHUNK, remaining):
                    raise _too_short(stored.shard, name)
                yield data


def _too_short(shard: Path, name: str) -> EspalierError:
    return InputError(f"{shard}: ends before tensor {name}; copy the file again")


def _shards(directory: Path) -> list[Path]:
    """Return the files from which ``from_pretrained`` reads the weights.

    Refuse a directory from which it would load other weights.
    """
    # transformers would apply the adapter silently.
    if (directory / ADAPTER).is_file():
        raise InputError(
            f"{directory}: {ADAPTER} is in the directory of the model, and transformers would"
            " add that adapter to the model; move the adapter to its own directory, or merge it"
            " into the model"
        )
    if distributed := sorted(directory.glob("shard-*-model-*-of-*.safetensors")):
        raise InputError(
            f"{distributed[0]}: is a shard of distributed training, which transformers would load"
            f" instead of {SINGLE}; move these shards away, or {WRITE_AGAIN}"
        )
    # The order of transformers: a single file has precedence over an index.
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return _shards_of_index(directory / INDEX)
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern))
    hint = f", but {', '.join(others[:3])}" if others else ""
    raise InputError(f"{directory}: contains neither {SINGLE} nor {INDEX}{hint}; {WRITE_AGAIN}")


def _shards_of_index(index: Path) -> list[Path]:
    shards = [index.parent / name for name in shard_names(index)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise InputError(
            f"{index}: names {', '.join(map(repr, missing))}, but these files do not exist; copy"
            " what is missing"
        )
    return shards


def _read_header(shard: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and the location of each tensor of a file."""
    try:
        # The library says of any file that it cannot open that it does not exist.
        with open(shard, "rb"):
            pass
        # The library checks that the header is well-formed and describes all bytes of the file.
        with safe_open(shard, "np"):
            pass
    except OSError as error:
        raise InputError(
            f"{shard}: cannot be read: {error.strerror or error}; give this user the right to read"
            " it, or copy it again"
        ) from None
    except SafetensorError as error:
        with open(shard, "rb") as file:
            is_pointer = file.read(8) == b"version "
        remedy = (
            "it is a Git LFS pointer instead of the file; fetch the file with: git lfs pull"
            if is_pointer
            else "copy the file again"
        )
        raise InputError(f"{shard}: is not a whole safetensors file: {error}; {remedy}") from None
    with open(shard, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        # The library has validated the header before.
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise InputError(
                f"{shard}: tensor {name} has the unsupported dtype {entry['dtype']}; convert the"
                " model to float32, float16 or bfloat16"
            )
        # Offsets count from the end of the header.
        start = 8 + size + entry["data_offsets"][0]
        yield name, StoredTensor(entry["dtype"], tuple(entry["shape"]), shard, start)


FORMAT = {"format": "pt"}
"""Metadata of a file that transformers reads."""


def shard_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = FORMAT) -> bytes:
    """Return the bytes before the data of a safetensors file with these tensors, in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding with spaces aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_shard(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterator[tuple[str, "Tensor"]],
    metadata: Mapping[str, str] = FORMAT,
) -> None:
    """Write a safetensors file atomically, tensor by tensor.

    Parameters
    ----------
    path : the file
    specs : tensors of the file, in order
    tensors : the same tensors with their names, in the same order; further ones are not taken
    metadata : content of ``__metadata__``

    Raises
    ------
    InputError
        Writing failed.
    ValueError
        A tensor is not the next one, or has another size.
    """
    with replacing(path) as file:
        file.write(shard_header(specs, metadata))
        for expected, spec in specs.items():
            name, value = next(tensors)
            data = bits_of(value)
            # Order and size must be those of the header, which is written already.
            if name != expected or len(data) != spec.num_bytes:
                raise ValueError(
                    f"expected {spec.num_bytes} bytes of {expected}, but got {len(data)} of {name}"
                )
            file.write(data.numpy().data)


def bits_of(value: "Tensor") -> "Tensor":
    """Return the bytes of a CPU tensor as a flat uint8 tensor."""
    import torch

    return value.contiguous().view(-1).view(torch.uint8)


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
        # A reading that has begun cannot be cancelled, so it is awaited.
        for tensor in self._begun.values():
            tensor.cancel()
        wait(self._begun.values())
        self._begun = {}
        for name in names:
            # Pinned memory is allocated here, because the thread must not use the device.
            room = self._checkpoint.room(name, self._pinned)
            self._begun[name] = self._thread.submit(self._checkpoint.read_into, name, room)

    def take(self, name: str) -> "Tensor":
        """Return one tensor when it is read; a tensor that was not requested is read now.

        Raises
        ------
        InputError
            The file is too short.
        OSError
            Reading failed.
        """
        future = self._begun.pop(name, None)
        return future.result() if future else self._checkpoint.read(name)
