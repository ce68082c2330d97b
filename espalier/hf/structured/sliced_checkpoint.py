"""Tensors of a pruned model, read from the base model's files.

Parts that are not kept are mostly skipped, and never held in memory. Column scales are applied as a
matrix is read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.hf.files.checkpoint import CHUNK, Checkpoint, StoredTensor
from espalier.hf.structured.slices import Slice
from espalier.messages.payload import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

GAP = 64 * 1024
"""Maximum number of bytes between two kept rows that are read along and dropped.

A separate read takes as long.
"""

Stretch = tuple[int, int, int, int]
"""Range of rows in the base (first, end), and range of kept rows in it (first, end)."""


class SlicedCheckpoint(Checkpoint):
    """Checkpoint whose tensors are slices of another one's tensors, or given tensors.

    Parameters
    ----------
    base : checkpoint of the base
    slices : slice of the base by name of the tensor in this checkpoint
    given : tensors in memory that replace slices or that the base does not have; they are never
        changed
    """

    def __init__(
        self, base: Checkpoint, slices: Mapping[str, Slice], given: Mapping[str, "Tensor"]
    ) -> None:
        from espalier.hf.files.dtypes import SAFETENSORS_DTYPES

        self.directory = base.directory
        self.base = base
        self.all_slices = dict(slices)
        """All slices, including those that are replaced by given tensors."""
        self.slices = {name: slice for name, slice in slices.items() if name not in given}
        self.given = dict(given)
        self.tensors: dict[str, StoredTensor] = {}
        for name, slice in slices.items():
            stored = base.tensors[slice.source]
            self._add(name, stored.shard, stored.dtype, slice.shape(stored.shape))
        for name, tensor in self.given.items():
            shard = self.tensors[name].shard if name in self.tensors else base.shards[-1]
            self._add(name, shard, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))
        used = {stored.shard for stored in self.tensors.values()}
        self.shards = [shard for shard in base.shards if shard in used]

    def _add(self, name: str, shard: Path, dtype: str, shape: tuple[int, ...]) -> None:
        self.tensors[name] = StoredTensor(
            shard, dtype, shape, 0, DTYPE_BYTES[dtype] * math.prod(shape)
        )

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor into ``room`` and return it.

        In addition, at most 16 MiB of the base are in memory.
        """
        if name in self.given:
            return room.copy_(self.given[name])
        slice = self.slices[name]
        if slice.is_whole:
            return self.base.read_into(slice.source, room)
        for start, piece in self._pieces(slice):
            room[start : start + len(piece)] = piece
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive) of one tensor into new memory."""
        return self.read(name)[first:last].clone()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB; whole rows for a slice."""
        import torch

        if name in self.given:
            raw = self.given[name].contiguous().view(-1).view(torch.uint8)
            yield from (piece.numpy().tobytes() for piece in raw.split(CHUNK))
            return
        slice = self.slices[name]
        if slice.is_whole:
            yield from self.base.chunks(slice.source)
            return
        for _, piece in self._pieces(slice):
            yield piece.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def _pieces(self, slice: Slice) -> Iterator[tuple[int, "Tensor"]]:
        """Yield the kept rows in pieces: index of the first row among the kept ones, and rows."""
        import torch

        stored = self.base.tensors[slice.source]
        width = math.prod(stored.shape[1:])
        rows = range(stored.shape[0]) if slice.rows is None else slice.rows
        columns = None if slice.columns is None else torch.tensor(slice.columns)
        for first, last, start, stop in stretches(rows, width * DTYPE_BYTES[stored.dtype]):
            piece = self.base.read_rows(slice.source, first, last)
            # The stretch contains rows that are not kept.
            if last - first != stop - start:
                piece = piece.index_select(0, torch.tensor(rows[start:stop]) - first)
            piece = piece if columns is None else piece.index_select(1, columns)
            yield (
                start,
                (
                    piece
                    if slice.scales is None
                    else (piece.to(torch.float32) * slice.scales).to(piece.dtype)
                ),
            )


def stretches(rows: Sequence[int], row_bytes: int) -> Iterator[Stretch]:
    """Split ascending row numbers into stretches that are read at once.

    A stretch has at most 16 MiB, unless one row is longer, and no gap of more than ``GAP`` bytes.
    """
    most = max(1, CHUNK // max(1, row_bytes))
    gap = GAP // max(1, row_bytes)
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] - rows[at - 1] - 1 > gap or rows[at] - rows[start] >= most:
            yield rows[start], rows[at - 1] + 1, start, at
            start = at
