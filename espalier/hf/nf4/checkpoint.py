"""Files with NF4 matrices, presented as files with float32 matrices.

Matrices are dequantised as they are read. In addition to the requested values, one stretch of whole
blocks is in memory. Code that streams, cuts, tunes or evaluates a model therefore works with NF4
files too. Only code that computes in NF4 reads the codes.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from espalier.errors import InputError
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
from espalier.hf.structured.cut_checkpoint import CutCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from espalier.hf.nf4.matrices import Nf4Matrix

UNIT = BLOCK * NESTED_BLOCK
"""Number of weights that share a second-level scale."""
STRETCH = 1 << 20
"""Number of weights that are dequantised at a time, a multiple of the block size.

In float32 they take 4 MiB.
"""


class QuantisedCheckpoint(Checkpoint):
    """Files with some matrices in NF4, each of which appears as float32 with its own shape.

    Weights equal the result of bitsandbytes' ``dequantize_4bit`` in float32, bit for bit.

    Parameters
    ----------
    files : the files as they are
    double_quantisation : True if the scales of all matrices are quantised too

    Raises
    ------
    InputError
        A tensor that belongs to a matrix is missing, has another shape or dtype, or is quantised in
        another way.
    """

    def __init__(self, files: Checkpoint, double_quantisation: bool) -> None:
        self.directory = files.directory
        self.shards = files.shards
        self.files = files
        """Tensors as they are stored."""
        self.double_quantisation = double_quantisation
        beside = {f".{part}" for part in (*PARTS, OTHER_STATE)}
        of = {
            name: name.removesuffix(end)
            for name in files.tensors
            for end in beside
            if name.endswith(end)
        }
        # Such matrices are reported as incomplete if all other tensors are missing.
        packed = [
            name
            for name, stored in files.tensors.items()
            if stored.dtype == "U8" and name.endswith(".weight")
        ]
        self.matrices: dict[str, HeldMatrix] = {
            name: self._held(name) for name in sorted({*of.values(), *packed})
        }
        """Quantisation state of each NF4 matrix, by name."""
        if not self.matrices:
            raise InputError(
                f"{self.directory}: {CONFIG_KEY} in config.json is set, but no matrix is in NF4;"
                f" files and config.json belong to different models: remove {CONFIG_KEY}, or"
                " name the files in NF4"
            )
        self.tensors = {
            name: self._shown(name, stored)
            for name, stored in files.tensors.items()
            if name not in of
        }
        self._right_tables: set[str] = set()

    def _held(self, name: str) -> HeldMatrix:
        """Return the quantisation state of a matrix after checking all tensors of the matrix."""
        tensors = self.files.tensors
        if f"{name}.{OTHER_STATE}" in tensors:
            where = tensors[f"{name}.{OTHER_STATE}"].shard
            raise InputError(
                f"{where}: {name} is quantised to FP4; name the model before quantisation, or in"
                " NF4"
            )
        state = self._require(name, f"{name}.{STATE}", "U8", None)
        if state.num_bytes > LONGEST_STATE:
            what = (
                f"{state.shard}: tensor {name}.{STATE} has {state.num_bytes} bytes, more than"
                f" {LONGEST_STATE}"
            )
            raise InputError(
                f"{what}, and was not written by bitsandbytes; quantise the model again"
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
            remedy = "copy the model again, or name the model before quantisation"
            raise InputError(f"{state.shard}: tensor {name}.{STATE}: {why}; {remedy}") from None
        self._require(name, name, "U8", (math.prod(held.shape) // 2, 1))
        for part, (dtype, shape, _) in stored_parts(held.shape, self.double_quantisation).items():
            self._require(name, f"{name}.{part}", dtype, shape)
        return held

    def _require(
        self, matrix: str, name: str, dtype: str, shape: tuple[int, ...] | None
    ) -> StoredTensor:
        """Return a tensor of a matrix after checking its dtype and, unless None, its shape."""
        stored = self.files.tensors.get(name)
        if stored is None:
            near = self.files.tensors.get(matrix)
            where = near.shard if near else self.shards[0]
            raise InputError(
                f"{where}: tensor {name} is missing, which belongs to {matrix} in NF4; copy the"
                " files of the model again"
            )
        if stored.dtype != dtype or shape not in (None, stored.shape):
            wanted = dtype if shape is None else f"{dtype} {list(shape)}"
            raise InputError(
                f"{stored.shard}: tensor {name} is {stored.dtype} {list(stored.shape)}, but"
                f" {matrix} in NF4 needs {wanted}; quantise the model again"
            )
        return stored

    def _shown(self, name: str, stored: StoredTensor) -> StoredTensor:
        if (held := self.matrices.get(name)) is None:
            return stored
        return StoredTensor(stored.shard, "F32", held.shape, 0, 4 * math.prod(held.shape))

    def matrix(self, name: str, device: "torch.device") -> "Nf4Matrix":
        """Return an NF4 matrix as it is stored, on a device.

        Raises
        ------
        InputError
            The file is too short, or its tables are not those of NF4.
        """
        from espalier.hf.nf4.matrices import Nf4Matrix

        shape = self.matrices[name].shape
        whole = self._blocks(name, 0, math.prod(shape) // BLOCK)
        return Nf4Matrix(
            shape, **{part: tensor.to(device) for part, tensor in whole.tensors.items()}
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
        at = 0
        for values in self._values(name, first, first + room.numel()):
            flat[at : at + len(values)] = values
            at += len(values)
        return room

    def _values(self, name: str, first: int, last: int) -> Iterator["Tensor"]:
        """Yield the weights from ``first`` to ``last`` (exclusive) in flat float32 stretches.

        Both indices must be multiples of the block size.
        """
        from espalier.hf.nf4.matrices import dequantised

        for start in range(first, last, STRETCH):
            stop = min(last, start + STRETCH)
            # Blocks that share a second-level scale must be read together from the first one on.
            begin = start // UNIT * UNIT
            stretch = self._blocks(name, begin // BLOCK, stop // BLOCK)
            yield dequantised(stretch, self._tables).view(-1)[start - begin :]

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
                raise InputError(
                    f"{stored.shard}: tensor {name}.{part} is not the NF4 table of bitsandbytes;"
                    " quantise the model again"
                )
        self._right_tables.add(name)


def held_in_nf4(checkpoint: Checkpoint, name: str) -> tuple[QuantisedCheckpoint, str] | None:
    """Return the files that hold a matrix in NF4, and its name there.

    Returns None if the matrix is not in NF4, or if rows or columns were cut or scaled.
    """
    if isinstance(checkpoint, CutCheckpoint):
        part = checkpoint.parts.get(name)
        if part is None or not part.is_whole or name in checkpoint.given:
            return None
        return held_in_nf4(checkpoint.base, part.source)
    return (
        (checkpoint, name)
        if isinstance(checkpoint, QuantisedCheckpoint) and name in checkpoint.matrices
        else None
    )
