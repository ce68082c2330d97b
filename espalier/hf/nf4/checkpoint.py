"""A model's files that hold matrices in NF4, shown as files that hold them in float32: dequantised as they are read.

What is in memory beyond the values that are asked for is a stretch of whole blocks. So whatever walks, cuts, tunes or evaluates
a model does so with one that lies in NF4; only what computes in NF4 itself asks for the codes.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from espalier.errors import Mistake
from espalier.hf.files.checkpoint import Checkpoint, StoredTensor
from espalier.hf.nf4.layout import (
    BLOCK,
    CONFIG_KEY,
    LONGEST_STATE,
    NESTED_BLOCK,
    OTHER_STATE,
    PARTS,
    STATE,
    HeldMatrix,
    held_matrix,
    stored_parts,
)
from espalier.hf.structured.sliced_checkpoint import SlicedCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from espalier.hf.nf4.matrices import Nf4Matrix

UNIT = BLOCK * NESTED_BLOCK
"""Weights that share a scale of scales."""
STRETCH = 1 << 20
"""Weights that are dequantised at a time, a multiple of a block: 4 MiB in float32."""


class QuantisedCheckpoint(Checkpoint):
    """Files in which some matrices are in NF4; here each is float32 and has its own shape.

    A weight is what bitsandbytes' ``dequantize_4bit`` makes of it in float32, bit for bit.

    Parameters
    ----------
    files : as they are
    double_quantisation : whether the scales of all matrices are quantised too

    Raises
    ------
    Mistake
        What belongs to a matrix is missing, of another shape or dtype, or quantised in another way.
    """

    def __init__(self, files: Checkpoint, double_quantisation: bool) -> None:
        self.directory = files.directory
        self.shards = files.shards
        self.files = files
        """The tensors as they are stored."""
        self.double_quantisation = double_quantisation
        beside = {f".{part}" for part in (*PARTS, OTHER_STATE)}
        of = {
            name: name.removesuffix(end)
            for name in files.tensors
            for end in beside
            if name.endswith(end)
        }
        packed = [
            name
            for name, stored in files.tensors.items()
            if stored.dtype == "U8" and name.endswith(".weight")
        ]
        self.matrices: dict[str, HeldMatrix] = {
            name: self._held(name) for name in sorted({*of.values(), *packed})
        }
        """What is known of each matrix in NF4, by its name."""
        if not self.matrices:
            raise Mistake(
                f"{self.directory}: {CONFIG_KEY} in config.json is set, but no matrix is in NF4;"
                f" files and config.json are not of one model: remove {CONFIG_KEY}, or name the"
                " files in NF4"
            )
        self.tensors = {
            name: self._shown(name, stored)
            for name, stored in files.tensors.items()
            if name not in of
        }
        self._right_tables: set[str] = set()

    def _held(self, name: str) -> HeldMatrix:
        """What a matrix's state says, after all that belongs to the matrix was found."""
        tensors = self.files.tensors
        if f"{name}.{OTHER_STATE}" in tensors:
            where = tensors[f"{name}.{OTHER_STATE}"].shard
            raise Mistake(
                f"{where}: {name} is quantised to FP4; name the model as it was before it was"
                " quantised, or in NF4"
            )
        state = self._require(name, f"{name}.{STATE}", "U8", None)
        if state.num_bytes > LONGEST_STATE:
            what = (
                f"{state.shard}: tensor {name}.{STATE} has {state.num_bytes} bytes, more than"
                f" {LONGEST_STATE}"
            )
            raise Mistake(
                f"{what}, and is no state that bitsandbytes writes; quantise the model anew"
            )
        try:
            held = held_matrix(
                b"".join(self.files.chunks(f"{name}.{STATE}")), self.double_quantisation
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = (
                error
                if type(error) is ValueError
                else f"it cannot be read ({type(error).__name__}: {error})"
            )
            remedy = "copy the model again, or name it as it was before it was quantised"
            raise Mistake(f"{state.shard}: tensor {name}.{STATE}: {why}; {remedy}") from None
        self._require(name, name, "U8", (math.prod(held.shape) // 2, 1))
        for part, (dtype, shape, _) in stored_parts(held.shape, self.double_quantisation).items():
            self._require(name, f"{name}.{part}", dtype, shape)
        return held

    def _require(
        self, matrix: str, name: str, dtype: str, shape: tuple[int, ...] | None
    ) -> StoredTensor:
        """A tensor that belongs to a matrix, if it is there, of this dtype and, unless None, of this shape."""
        stored = self.files.tensors.get(name)
        if stored is None:
            near = self.files.tensors.get(matrix)
            where = near.shard if near else self.shards[0]
            raise Mistake(
                f"{where}: tensor {name} is missing, which belongs to {matrix} in NF4; copy the"
                " files of the model again"
            )
        if stored.dtype != dtype or shape not in (None, stored.shape):
            wanted = dtype if shape is None else f"{dtype} {list(shape)}"
            raise Mistake(
                f"{stored.shard}: tensor {name} is {stored.dtype} {list(stored.shape)}, not"
                f" {wanted} as {matrix} in NF4 needs; quantise the model anew"
            )
        return stored

    def _shown(self, name: str, stored: StoredTensor) -> StoredTensor:
        if (held := self.matrices.get(name)) is None:
            return stored
        return StoredTensor(stored.shard, "F32", held.shape, 0, 4 * math.prod(held.shape))

    def matrix(self, name: str, device: "torch.device") -> "Nf4Matrix":
        """A matrix as it is stored, on a device.

        Raises
        ------
        Mistake
            The file ends before it, or its tables are not those of NF4.
        """
        from espalier.hf.nf4.matrices import Nf4Matrix

        shape = self.matrices[name].shape
        whole = self._blocks(name, 0, math.prod(shape) // BLOCK)
        return Nf4Matrix(
            shape, **{part: tensor.to(device) for part, tensor in whole.tensors.items()}
        )

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Fill the room of one tensor, and return it; beside it at most 4 MiB of values and their codes are in memory."""
        if name not in self.matrices:
            return self.files.read_into(name, room)
        return self._fill_with(name, room, 0)

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Rows from ``first`` to before ``last`` of one tensor, in memory of their own."""
        import torch

        if name not in self.matrices:
            return self.files.read_rows(name, first, last)
        width = self.matrices[name].shape[1]
        return self._fill_with(name, torch.empty(last - first, width), first * width)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor, in pieces of at most 16 MiB; of a matrix in NF4 of at most 4 MiB."""
        if name not in self.matrices:
            yield from self.files.chunks(name)
            return
        for values in self._values(name, 0, math.prod(self.matrices[name].shape)):
            yield values.numpy().tobytes()

    def _fill_with(self, name: str, room: "Tensor", first: int) -> "Tensor":
        """Fill memory with a matrix's weights from ``first`` on."""
        flat = room.view(-1)
        at = 0
        for values in self._values(name, first, first + room.numel()):
            flat[at : at + len(values)] = values
            at += len(values)
        return room

    def _values(self, name: str, first: int, last: int) -> Iterator["Tensor"]:
        """Weights from ``first`` to before ``last``, both of whole blocks, flat, float32, a stretch at a time."""
        from espalier.hf.nf4.matrices import dequantised

        for start in range(first, last, STRETCH):
            stop = min(last, start + STRETCH)
            begin = start // UNIT * UNIT
            stretch = self._blocks(name, begin // BLOCK, stop // BLOCK)
            yield dequantised(stretch, self._tables).view(-1)[start - begin :]

    def _blocks(self, name: str, first: int, last: int) -> "Nf4Matrix":
        """Blocks of a matrix as rows of another, from a multiple of 256 to before ``last``."""
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
        """Raise Mistake, when a matrix is first read, if its codes stand for other values than bitsandbytes' own tables say."""
        import torch

        if name in self._right_tables:
            return
        for part, table in (("quant_map", "table"), ("nested_quant_map", "nested_table")):
            stored = self.files.tensors.get(f"{name}.{part}")
            if stored is not None and not torch.equal(
                self.files.read(f"{name}.{part}"), self._tables[table]
            ):
                raise Mistake(
                    f"{stored.shard}: tensor {name}.{part} is not bitsandbytes' table of NF4;"
                    " quantise it anew"
                )
        self._right_tables.add(name)


def held_in_nf4(checkpoint: Checkpoint, name: str) -> tuple[QuantisedCheckpoint, str] | None:
    """The files that hold a matrix in NF4, and its name there; None of one that is held otherwise, or of which rows or columns
    were cut or scaled."""
    if isinstance(checkpoint, SlicedCheckpoint):
        slice = checkpoint.slices.get(name)
        if slice is None or not slice.is_whole:
            return None
        return held_in_nf4(checkpoint.base, slice.source)
    return (
        (checkpoint, name)
        if isinstance(checkpoint, QuantisedCheckpoint) and name in checkpoint.matrices
        else None
    )
