"""Files with NF4 matrices, presented as files with float32 matrices.

Matrices are dequantised as they are read. In addition to the requested values, one stretch of whole
blocks is in memory. Code that streams, cuts, tunes or evaluates a model therefore works with NF4
files too. Only code that computes in NF4 reads the codes.

The layout is that of bitsandbytes and transformers. ``config.json`` describes the quantisation
under ``quantization_config``. A matrix of n weights is stored as ``<parameter>``, shape (n / 2, 1),
with two codes per byte. Further tensors have the same name with a suffix:

- ``absmax`` and ``quant_map``
- ``nested_absmax`` and ``nested_quant_map``, with double quantisation
- ``quant_state.bitsandbytes__nf4``, a JSON text that holds the shape

``Nf4Matrix`` documents the first four. Opening does not import torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError
from espalier.hf.files.checkpoint import Checkpoint, StoredTensor
from espalier.hf.nf4.blocks import BLOCK, LEVELS, NESTED_BLOCK, NESTED_LEVELS
from espalier.hf.structured.cut_checkpoint import CutCheckpoint
from espalier.messages.tensor_blobs import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from espalier.hf.nf4.matrices import Nf4Matrix

CONFIG_KEY = "quantization_config"
"""Key of ``config.json`` that describes the quantisation."""
STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""Suffixes of the tensors that are stored next to the codes of a matrix."""
STATE_BYTES = 256
"""Size in bytes of a quantisation state that Espalier writes.

The JSON text is shorter and is padded with spaces, which JSON allows. The sizes of all tensors are
therefore known before the first one is quantised, and floats are aligned to multiples of their
size.
"""
LONGEST_STATE = 4096
"""Maximum size in bytes of a quantisation state that is read."""
UNIT = BLOCK * NESTED_BLOCK
"""Number of weights that share a second-level scale."""
STRETCH = 1 << 20
"""Number of weights that are dequantised at a time, a multiple of the block size.

In float32 they take 4 MiB.
"""


@dataclass(frozen=True)
class QuantisationState:
    """Content of the quantisation state of a matrix."""

    shape: tuple[int, int]
    """Shape (out_features, in_features)."""
    offset: float | None
    """Mean of the scales, representable in float32; None without double quantisation."""


def is_doubly_quantised(document: Any, where: str) -> bool:
    """Return whether a ``quantization_config``, the one of the file ``where``, has double scales.

    Raises
    ------
    InputError
        The model is not quantised to NF4 by bitsandbytes. The message names the key that differs.
    """
    config = document if isinstance(document, Mapping) else {}
    # Files may leave out keys with the default value, for which None stands.
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_method": ("bitsandbytes",),
        "load_in_8bit": (False, None),
        "load_in_4bit": (True,),
        "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8", None),
        "bnb_4bit_use_double_quant": (True, False, None),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise InputError(
                f"{where}: {CONFIG_KEY} is set, with {key} = {config.get(key)!r}; name the model"
                " before quantisation, or a model in NF4 of bitsandbytes (load_in_4bit,"
                " bnb_4bit_quant_type = 'nf4')"
            )
    return bool(config.get("bnb_4bit_use_double_quant"))


def stored_parts(shape: tuple[int, int], double_quantisation: bool) -> dict[str, TensorSpec]:
    """Return the tensors that belong to the codes of a matrix, by suffix of the tensor name.

    The quantisation state is not included.
    """
    blocks = shape[0] * shape[1] // BLOCK
    table = TensorSpec("F32", (LEVELS,))
    if not double_quantisation:
        return {"absmax": TensorSpec("F32", (blocks,)), "quant_map": table}
    return {
        "absmax": TensorSpec("U8", (blocks,)),
        "quant_map": table,
        # Rounded up.
        "nested_absmax": TensorSpec("F32", (-(-blocks // NESTED_BLOCK),)),
        "nested_quant_map": TensorSpec("F32", (NESTED_LEVELS,)),
    }


class QuantisedCheckpoint(Checkpoint):
    """Files with some matrices in NF4, each of which appears as float32 with its own shape.

    Weights equal the result of bitsandbytes' ``dequantize_4bit`` in float32, bit for bit. Raises
    InputError if a tensor that belongs to a matrix is missing, has another shape or dtype, or is
    quantised in another way.

    Parameters
    ----------
    files : the files as they are
    double_quantisation : True if the scales of all matrices are quantised too
    """

    def __init__(self, files: Checkpoint, double_quantisation: bool) -> None:
        self.directory = files.directory
        self.shards = files.shards
        self.files = files
        """Tensors as they are stored."""
        self.double_quantisation = double_quantisation
        matrix_names = {
            name: name.removesuffix(f".{part}")
            for name in files.tensors
            for part in PARTS
            if name.endswith(f".{part}")
        }
        # Such matrices are reported as incomplete if all other tensors are missing.
        packed = [
            name
            for name, stored in files.tensors.items()
            if stored.dtype == "U8" and name.endswith(".weight")
        ]
        self.matrices: dict[str, QuantisationState] = {
            name: self._state_of(name) for name in sorted({*matrix_names.values(), *packed})
        }
        """Quantisation state of each NF4 matrix, by name."""
        if not self.matrices:
            raise InputError(
                f"{self.directory}: {CONFIG_KEY} in config.json is set, but no matrix is in NF4;"
                f" files and config.json belong to different models: remove {CONFIG_KEY}, or"
                " name the files in NF4"
            )
        self.tensors = {
            name: (
                StoredTensor("F32", self.matrices[name].shape, stored.shard)
                if name in self.matrices
                else stored
            )
            for name, stored in files.tensors.items()
            if name not in matrix_names
        }
        self._right_tables: set[str] = set()

    def _state_of(self, name: str) -> QuantisationState:
        """Return the quantisation state of a matrix after checking all tensors of the matrix."""
        key = f"{name}.{STATE}"
        state = self.files.tensors.get(key)
        if state is None:
            raise self._wrong(key, "is missing")
        try:
            if state.dtype != "U8" or state.num_bytes > LONGEST_STATE:
                raise ValueError(f"it is no text of at most {LONGEST_STATE} bytes")
            parsed = parse_state(b"".join(self.files.chunks(key)), self.double_quantisation)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(key, f"was not written by bitsandbytes: {error}") from None
        parts = stored_parts(parsed.shape, self.double_quantisation)
        specs = {name: TensorSpec("U8", (math.prod(parsed.shape) // 2, 1))}
        specs |= {f"{name}.{part}": spec for part, spec in parts.items()}
        for part, spec in specs.items():
            stored = self.files.tensors.get(part)
            if stored is None:
                raise self._wrong(part, "is missing")
            if (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
                raise self._wrong(
                    part,
                    f"is {stored.dtype} {list(stored.shape)}, not {spec.dtype} {list(spec.shape)}",
                )
        return parsed

    def _wrong(self, name: str, problem: str) -> EspalierError:
        """Return the error for a tensor that belongs to a matrix in NF4."""
        stored = self.files.tensors.get(name)
        path = stored.shard if stored else self.directory
        return InputError(
            f"{path}: tensor {name} of a matrix in NF4 {problem}; copy the model again, or name the"
            " model before quantisation"
        )

    def matrix(self, name: str, device: "torch.device") -> "Nf4Matrix":
        """Return an NF4 matrix as it is stored, on a device."""
        from espalier.hf.nf4.matrices import Nf4Matrix

        shape = self.matrices[name].shape
        blocks = self._blocks(name, 0, math.prod(shape) // BLOCK)
        return Nf4Matrix(
            shape, **{part: tensor.to(device) for part, tensor in blocks.tensors.items()}
        )

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor into ``room`` and return it.

        In addition, at most 4 MiB of values and their codes are in memory.
        """
        if name not in self.matrices:
            return self.files.read_into(name, room)
        return self._fill_with(name, room, 0)

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive) of one tensor into new memory."""
        import torch

        if name not in self.matrices:
            return self.files.read_rows(name, first, last)
        width = self.matrices[name].shape[1]
        return self._fill_with(name, torch.empty(last - first, width), first * width)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB; 4 MiB for an NF4 matrix."""
        if name not in self.matrices:
            yield from self.files.chunks(name)
            return
        for values in self._values(name, 0, math.prod(self.matrices[name].shape)):
            yield values.numpy().tobytes()

    def _fill_with(self, name: str, room: "Tensor", first: int) -> "Tensor":
        """Fill memory with the weights of a matrix, starting at index ``first``."""
        flat = room.view(-1)
        start = 0
        for values in self._values(name, first, first + room.numel()):
            flat[start : start + len(values)] = values
            start += len(values)
        return room

    def _values(self, name: str, first: int, last: int) -> Iterator["Tensor"]:
        """Yield the weights from ``first`` to ``last`` (exclusive) in flat float32 stretches.

        Both indices must be multiples of the block size.
        """
        from espalier.hf.nf4.matrices import dequantised

        for start in range(first, last, STRETCH):
            stop = min(last, start + STRETCH)
            # Blocks that share a second-level scale must be read together from the first one on.
            unit_start = start // UNIT * UNIT
            stretch = self._blocks(name, unit_start // BLOCK, stop // BLOCK)
            yield dequantised(stretch, self._tables).view(-1)[start - unit_start :]

    def _blocks(self, name: str, first: int, last: int) -> "Nf4Matrix":
        """Return the blocks from ``first`` to ``last`` (exclusive) as a matrix, one per row.

        ``first`` must be a multiple of 256.
        """
        import torch

        from espalier.hf.nf4.matrices import Nf4Matrix

        self._require_tables(name)
        shape = (last - first, BLOCK)
        offset = self.matrices[name].offset
        packed = self.files.read_rows(name, first * BLOCK // 2, last * BLOCK // 2)
        absmax = self.files.read_rows(f"{name}.absmax", first, last)
        if offset is None:
            return Nf4Matrix(shape, packed, absmax)
        nested = self.files.read_rows(
            f"{name}.nested_absmax", first // NESTED_BLOCK, -(-last // NESTED_BLOCK)
        )
        return Nf4Matrix(shape, packed, absmax, nested, torch.tensor(offset, dtype=torch.float32))

    @cached_property
    def _tables(self) -> dict[str, "Tensor"]:
        import torch

        from espalier.hf.nf4.matrices import tables

        return tables(torch.device("cpu"))

    def _require_tables(self, name: str) -> None:
        """Raise InputError if the tables of a matrix are not those of bitsandbytes.

        Each matrix is checked once, at its first read.
        """
        import torch

        if name in self._right_tables:
            return
        for part, table in (("quant_map", "table"), ("nested_quant_map", "nested_table")):
            stored = self.files.tensors.get(f"{name}.{part}")
            if stored is not None and not torch.equal(
                self.files.read(f"{name}.{part}"), self._tables[table]
            ):
                raise self._wrong(f"{name}.{part}", "is not the table of bitsandbytes")
        self._right_tables.add(name)


def parse_state(state: bytes, double_quantisation: bool) -> QuantisationState:
    """Parse the quantisation state of a matrix.

    Raises ValueError if the state is not a JSON text, or it describes another quantisation than NF4
    in blocks of 64.
    """
    stored = read_json(state)
    shape = tuple(stored["shape"])
    offset = stored.get("nested_offset")
    if len(shape) != 2 or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError("it has no shape")
    if (stored["quant_type"], stored["blocksize"]) != ("nf4", BLOCK):
        raise ValueError(f"it is not NF4 in blocks of {BLOCK}")
    # Blocks must not continue in the next row; see ``require_whole_blocks``.
    if shape[1] % BLOCK:
        raise ValueError(f"its rows are not a multiple of the block size {BLOCK}")
    if double_quantisation != ("nested_blocksize" in stored):
        raise ValueError(
            f"{CONFIG_KEY} in config.json disagrees on whether its scales are quantised"
        )
    if double_quantisation:
        if (
            stored["nested_blocksize"] != NESTED_BLOCK
            or not isinstance(offset, float)
            or not math.isfinite(offset)
        ):
            raise ValueError("its scales are quantised in an unknown way")
    return QuantisationState((shape[0], shape[1]), offset if double_quantisation else None)


def stored_in_nf4(checkpoint: Checkpoint, name: str) -> tuple[QuantisedCheckpoint, str] | None:
    """Return the files that hold a matrix in NF4, and its name there.

    Returns None if the matrix is not in NF4, or if rows or columns were cut or scaled.
    """
    if isinstance(checkpoint, CutCheckpoint):
        part = checkpoint.parts.get(name)
        if part is None or not part.is_whole or name in checkpoint.given:
            return None
        return stored_in_nf4(checkpoint.base, part.source)
    if isinstance(checkpoint, QuantisedCheckpoint) and name in checkpoint.matrices:
        return checkpoint, name
    return None
