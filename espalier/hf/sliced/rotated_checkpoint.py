"""Tensors of a sliced model, derived from those of the base model when they are read.

Each tensor is fused with the scale of its norm, rotated, sliced, and rounded once. Block ``i``
reads the residual stream in basis ``2 i`` at its attention, and in basis ``2 i + 1`` at its
feed-forward part. The last basis is that of the head. One tensor and three bases are in memory at a
time.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor

from espalier.hf.export.model import require_finite
from espalier.hf.files.checkpoint import CHUNK, Checkpoint, StoredTensor, bits_of
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.export import is_tied, require_sliceable, sliced_config
from espalier.methods.pruning.slicegpt import dense_width
from pruning_kernels.groups.slicing import shortcut, sliced_reader, sliced_writer

Bases = Callable[[int], Tensor]
"""Function from the place of a basis to the basis: (hidden_size, kept), any floating dtype."""

READ_BEHIND = {
    "attn.q": "norm.attn", "attn.k": "norm.attn", "attn.v": "norm.attn",
    "attn.qkv": "norm.attn",
    "mlp.gate": "norm.mlp", "mlp.up": "norm.mlp", "mlp.gateup": "norm.mlp",
}  # fmt: skip
"""Matrices that read the residual stream, and the norm whose output they read."""
PLACES = {"norm.attn": 0, "norm.mlp": 1, "attn.o": 1, "mlp.down": 2}
"""Basis of a norm's output or of a matrix's output, relative to the first basis of the block."""
SHORTCUTS = ("attn_shortcut", "mlp_shortcut")


class RotatedCheckpoint(Checkpoint):
    """Checkpoint whose tensors are derived from those of a dense model.

    ``bases`` have ``width`` columns. ``tied`` is True if the dense model's head is tied to its
    embedding; the sliced model's head never is.
    """

    def __init__(self, base: OpenedModel, bases: Bases, width: int, tied: bool) -> None:
        self.directory = base.directory
        self.shards = base.checkpoint.shards
        self.tensors: dict[str, StoredTensor] = {}
        self._base = base
        self._files = base.checkpoint
        self._family = base.family
        self._width = width
        self._dense = dense_width(base.plan)
        # The tensors of a block use three bases.
        self._basis = lru_cache(maxsize=3)(lambda place: bases(place).to(torch.float64))
        self._made: dict[str, Callable[[], Tensor]] = {}
        self._copied: set[str] = set()
        self._names = {
            path: name for name, path in {**self._family.linears, **self._family.norms}.items()
        }
        # Embedding and head first: an untied head may replace a tied one.
        self._add_outer(tied)
        for name in list(self._files.tensors):
            if (split_name := self._family.block_of(name)) is not None:
                self._add_of_block(name, split_name[1], split_name[2])
            elif name not in self.tensors:
                self._copy(name)
        # New matrices of the residual connections.
        for block in base.plan.blocks:
            like = block.linear("attn.o").parameter
            for step, name in enumerate(SHORTCUTS):
                compute = partial(self._shortcut, 2 * block.index + step)
                self._add(
                    f"{self._family.blocks}.{block.index}.{name}.weight",
                    like,
                    (width, width),
                    compute,
                )

    def _add(
        self, name: str, like: str, shape: tuple[int, ...], compute: Callable[[], Tensor]
    ) -> None:
        """Add a tensor with the shard and dtype of one of the base's tensors."""
        stored = self._files.tensors[like]
        self.tensors[name] = StoredTensor(stored.dtype, shape, stored.shard)
        self._made[name] = compute

    def _copy(self, name: str) -> None:
        """Add a tensor as the base has it; if no module reads it, it may hold anything."""
        self._copied.add(name)
        self._add(name, name, self._files.tensors[name].shape, partial(self._files.read, name))

    def _add_outer(self, tied: bool) -> None:
        """Add embedding, final norm and head."""
        family = self._family
        # The last basis is that of the head's input.
        last = 2 * len(self._base.plan.blocks)
        embedding = f"{family.embeddings}.weight"
        head = f"{family.head}.weight"
        norm = f"{family.final_norm}.weight"
        for name, source, place, merged_norm in (
            (embedding, embedding, 0, None),
            (head, embedding if tied else head, last, norm),
        ):
            # Both have the vocabulary as rows.
            shape = (self._files.tensors[source].shape[0], self._width)
            self._add(name, source, shape, partial(self._reader, source, place, merged_norm))
        # The scale of the final norm is merged into the head.
        self._add(norm, norm, (self._width,), partial(torch.ones, self._width))

    def _add_of_block(self, name: str, index: int, path: str) -> None:
        shape = self._files.tensors[name].shape
        module, _, kind = path.rpartition(".")
        canonical = self._names.get(module, "")
        if canonical in READ_BEHIND and kind == "weight":
            # Matrices that read the stream: columns in the basis of the norm before.
            place = 2 * index + PLACES[READ_BEHIND[canonical]]
            norm = self._family.parameter_path(f"{READ_BEHIND[canonical]}.weight", index)
            compute = partial(self._reader, name, place, norm)
            self._add(name, name, (shape[0], self._width), compute)
        elif canonical in ("attn.o", "mlp.down"):
            # Matrices and biases that write to it: rows in the basis of the next reader.
            compute = partial(self._writer, name, 2 * index + PLACES[canonical])
            self._add(name, name, (self._width, *shape[1:]), compute)
        elif canonical in PLACES:
            # The scale of a norm is merged into the matrices that read its output.
            self._add(name, name, (self._width,), partial(torch.ones, self._width))
        else:
            # Biases of reading matrices and norms of heads are not on the residual stream.
            self._copy(name)

    def _reader(self, name: str, place: int, norm: str | None) -> Tensor:
        """Return a reading matrix in a basis, with the scale of its norm.

        The factor sqrt(dense width / width) corrects the norm's mean over fewer dimensions.
        """
        scale: Tensor | float = 1.0
        if norm:
            # Scale of the norm, and the factor for its mean over fewer dimensions.
            scale = self._files.read(norm).to(torch.float64) * math.sqrt(self._dense / self._width)
        return sliced_reader(self._files.read(name), self._basis(place), scale)

    def _writer(self, name: str, place: int) -> Tensor:
        return sliced_writer(self._files.read(name), self._basis(place))

    def _shortcut(self, place: int) -> Tensor:
        return shortcut(self._basis(place), self._basis(place + 1))

    def read_into(self, name: str, room: Tensor) -> Tensor:
        """Compute one tensor into ``room`` and return it."""
        # Computed in float64 and rounded once, to the dtype of the files.
        tensor = room.copy_(self._made[name]())
        if name not in self._copied:
            require_finite(name, tensor)
        return tensor

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows of one tensor, which is computed completely."""
        return self.read(name)[first:last].clone()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB."""
        for piece in bits_of(self.read(name)).split(CHUNK):
            yield piece.numpy().tobytes()


class SlicedModel(OpenedModel):
    """Base model with a rotated and sliced residual stream (SliceGPT section 3).

    ``bases`` have ``width`` columns. Raises InputError if the residual stream of the base cannot be
    rotated.
    """

    def __init__(self, base: OpenedModel, bases: Bases, width: int) -> None:
        require_sliceable(base)
        super().__init__(base.directory)
        self.checkpoint = RotatedCheckpoint(base, bases, width, is_tied(base))
        self.config = sliced_config(self.config, self.family, self.plan, width)
        # The plan follows from the new shapes.
        self.plan = self._make_plan()
