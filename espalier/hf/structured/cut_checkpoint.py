"""Tensors of a pruned model, read from the base model's files; other parts are mostly skipped."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from espalier.hf.families import Family
from espalier.hf.files.checkpoint import CHUNK, Checkpoint, StoredTensor, bits_of
from espalier.messages.tensor_blobs import DTYPE_BYTES
from espalier.models.plan import ModelPlan
from espalier.models.structure import COLUMNS, ROWS, Structure, kept_indices

if TYPE_CHECKING:
    from torch import Tensor

GAP = 64 * 1024
"""Maximum number of bytes between two kept rows that are read too; a second read takes as long."""

Stretch = tuple[int, int, int, int]
"""Range of rows in the base (first, end), and range of kept rows in it (first, end)."""


@dataclass(frozen=True)
class Part:
    """Kept part of a tensor of the base."""

    source: str
    """Name of the tensor in the base."""
    rows: Sequence[int] | None = None
    """Kept rows; None for all."""
    columns: Sequence[int] | None = None
    """Kept columns; None for all."""
    scales: "Tensor | None" = None
    """Factors of the kept columns, (kept columns,), float32; the product is rounded once."""

    @property
    def is_whole(self) -> bool:
        """True if the part is the unchanged tensor."""
        return self.rows is None and self.columns is None and self.scales is None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of shape ``whole``."""
        kept = (self.rows, self.columns)[: len(whole)]
        return (
            *(
                side if indices is None else len(indices)
                for side, indices in zip(whole, kept, strict=False)
            ),
            *whole[2:],
        )


class CutCheckpoint(Checkpoint):
    """Checkpoint with the parts of another one's tensors that a structure keeps.

    Parameters
    ----------
    base, family, plan : checkpoint, model family and plan of the base
    structure : structure to keep of the base; the blocks are renumbered
    given : tensors in memory that replace those of the base or that the base does not have; they
        are never changed
    scales : factors of a matrix's kept columns by name of the matrix, see ``Part.scales``
    """

    def __init__(
        self,
        base: Checkpoint,
        family: Family,
        plan: ModelPlan,
        structure: Structure,
        given: Mapping[str, "Tensor"],
        scales: Mapping[str, "Tensor"],
    ) -> None:
        from espalier.hf.files.dtypes import SAFETENSORS_DTYPES

        self.directory = base.directory
        self.base = base
        # Which part of which tensor of the base each tensor is.
        self.parts = dict(_parts(family, plan, structure, base.tensors))
        """Part of the base by name of the tensor, also for tensors that are replaced."""
        self.parts |= {
            name: replace(self.parts[name], scales=scale) for name, scale in scales.items()
        }
        self.given = dict(given)
        self.tensors: dict[str, StoredTensor] = {}
        for name, part in self.parts.items():
            stored = base.tensors[part.source]
            shape = part.shape(stored.shape)
            self.tensors[name] = StoredTensor(stored.dtype, shape, stored.shard)
        # Given tensors replace parts, or are new, such as biases.
        for name, tensor in self.given.items():
            shard = self.tensors[name].shard if name in self.tensors else base.shards[-1]
            dtype = SAFETENSORS_DTYPES[tensor.dtype]
            self.tensors[name] = StoredTensor(dtype, tuple(tensor.shape), shard)
        # Shards without a remaining tensor are left out.
        used_shards = {stored.shard for stored in self.tensors.values()}
        self.shards = [shard for shard in base.shards if shard in used_shards]

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor into ``room`` and return it; at most 16 MiB of the base are in memory."""
        if name in self.given:
            return room.copy_(self.given[name])
        part = self.parts[name]
        if part.is_whole:
            return self.base.read_into(part.source, room)
        # Piece by piece, so that only a few rows of the base are in memory.
        for start, piece in self._pieces(part):
            room[start : start + len(piece)] = piece
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive) of one tensor into new memory."""
        return self.read(name)[first:last].clone()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB; whole rows for a part."""
        if name in self.given:
            for piece in bits_of(self.given[name]).split(CHUNK):
                yield piece.numpy().tobytes()
            return
        part = self.parts[name]
        if part.is_whole:
            yield from self.base.chunks(part.source)
            return
        for _, piece in self._pieces(part):
            yield bits_of(piece).numpy().tobytes()

    def _pieces(self, part: Part) -> Iterator[tuple[int, "Tensor"]]:
        """Yield the kept rows in pieces: index of the first row among the kept ones, and rows."""
        import torch

        stored = self.base.tensors[part.source]
        width = math.prod(stored.shape[1:])
        rows = range(stored.shape[0]) if part.rows is None else part.rows
        columns = None if part.columns is None else torch.tensor(part.columns)
        for first, last, start, stop in stretches(rows, width * DTYPE_BYTES[stored.dtype]):
            piece = self.base.read_rows(part.source, first, last)
            # The stretch contains rows that are not kept.
            if last - first != stop - start:
                piece = piece.index_select(0, torch.tensor(rows[start:stop]) - first)
            if columns is not None:
                piece = piece.index_select(1, columns)
            if part.scales is not None:
                # In float32, rounded once.
                piece = (piece.to(torch.float32) * part.scales).to(piece.dtype)
            yield start, piece


def _parts(
    family: Family, plan: ModelPlan, structure: Structure, stored: Iterable[str]
) -> Iterator[tuple[str, Part]]:
    """Yield the name in the pruned model and the part of each stored tensor that is kept."""
    # New index of each remaining block.
    blocks_by_source = {
        block.source: (index, block) for index, block in enumerate(structure.blocks)
    }
    linears = {path: name for name, path in family.linears.items()}
    for name in stored:
        split_name = family.block_of(name)
        if split_name is None:
            yield name, Part(name)
            continue
        prefix, source, path = split_name
        if source not in blocks_by_source:
            continue
        index, block = blocks_by_source[source]
        module, _, kind = path.rpartition(".")
        rows = columns = None
        if module in linears and kind in ("weight", "bias"):
            # Rows are output features, columns input features; a bias has rows.
            rows = kept_indices(plan, structure, block, linears[module], ROWS)
        if module in linears and kind == "weight":
            columns = kept_indices(plan, structure, block, linears[module], COLUMNS)
        yield f"{prefix}{index}.{path}", Part(name, rows, columns)


def stretches(rows: Sequence[int], row_bytes: int) -> Iterator[Stretch]:
    """Split ascending row numbers into stretches that are read at once.

    A stretch has at most 16 MiB, unless one row is longer, and no gap of more than ``GAP`` bytes.
    """
    max_rows = max(1, CHUNK // max(1, row_bytes))
    max_gap = GAP // max(1, row_bytes)
    start = 0
    for stop in range(1, len(rows) + 1):
        # A new stretch begins where skipping pays off, or where the stretch is large enough.
        if (
            stop == len(rows)
            or rows[stop] - rows[stop - 1] - 1 > max_gap
            or rows[stop] - rows[start] >= max_rows
        ):
            yield rows[start], rows[stop - 1] + 1, start, stop
            start = stop
