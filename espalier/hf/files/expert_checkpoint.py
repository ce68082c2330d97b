"""Files of a mixture of experts, presented with the tensors that transformers has in memory.

Files hold each matrix of each expert as a tensor of its own. transformers stacks the experts of a
block: their matrices become one tensor, whose bytes are those of the files' tensors one after
another.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from espalier.errors import InputError
from espalier.hf.families import Family
from espalier.hf.files.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

Place = tuple[int, int]
"""Number of an expert, and position of a matrix among the expert's matrices in a stacked tensor."""


class ExpertCheckpoint(Checkpoint):
    """Checkpoint with the experts of each block stacked.

    Raises InputError if a matrix of an expert is missing, or differs from the first expert's in
    shape or dtype.
    """

    def __init__(self, files: Checkpoint, family: Family) -> None:
        self.directory = files.directory
        self.shards = files.shards
        self.files = files
        """Tensors as they are stored."""
        self.tensors: dict[str, StoredTensor] = {}
        self._parts: dict[str, list[str]] = {}
        """Tensors of the files that make up a tensor."""
        stacks: dict[str, dict[Place, str]] = {}
        for name, stored in files.tensors.items():
            full, place = _placed(name, family)
            # Tensors outside experts keep their place in the files.
            if place is None:
                self.tensors[full] = stored
                self._parts[full] = [name]
            else:
                stacks.setdefault(full, {})[place] = name
        for name, parts in stacks.items():
            self._stack(name, parts)

    @property
    def as_written(self) -> Checkpoint:
        """Tensors as they are stored, because other libraries expect experts one by one."""
        return self.files

    def _stack(self, name: str, places: dict[Place, str]) -> None:
        """Add a stacked tensor that is made of the files' tensors at these places."""
        # Numbers of experts and matrices count from 0 without gaps.
        number, position = max(places)
        parts = [places[place] for place in sorted(places)]
        first = self.files.tensors[parts[0]]
        specs = {(self.files.tensors[part].dtype, self.files.tensors[part].shape) for part in parts}
        if len(parts) != (number + 1) * (position + 1) or len(specs) > 1:
            raise InputError(
                f"{self.directory}: experts of {name} are missing, or differ in shape or dtype;"
                " copy the model again"
            )
        # (experts, rows of all matrices, columns)
        shape = (number + 1, (position + 1) * first.shape[0], *first.shape[1:])
        self.tensors[name] = StoredTensor(first.dtype, shape, first.shard)
        self._parts[name] = parts

    def read_into(self, name: str, room: "Tensor") -> "Tensor":
        """Read one tensor into ``room`` and return it."""
        parts = self._parts[name]
        # The parts follow each other in the memory of the stacked tensor.
        for part, view in zip(parts, room.view(len(parts), -1), strict=True):
            self.files.read_into(part, view)
        return room

    def read_rows(self, name: str, first: int, last: int) -> "Tensor":
        """Read the rows from ``first`` to ``last`` (exclusive); a stacked tensor is read whole."""
        if len(self._parts[name]) == 1:
            return self.files.read_rows(self._parts[name][0], first, last)
        return self.read(name)[first:last].clone()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor in pieces of at most 16 MiB."""
        for part in self._parts[name]:
            yield from self.files.chunks(part)


def _placed(name: str, family: Family) -> tuple[str, Place | None]:
    """Return the name of a files' tensor in transformers, and its place if that one is stacked."""
    if (split_name := family.block_of(name)) is None:
        return name, None
    prefix, index, path = split_name
    for target, templates in family.experts.items():
        for position, template in enumerate(templates):
            # ``{}`` in a template stands for the number of an expert.
            pattern = re.escape(template).replace(r"\{\}", "([0-9]+)")
            if match := re.fullmatch(pattern, path):
                place = (int(match[1]), position) if match.groups() else None
                return f"{prefix}{index}.{target}", place
    return name, None
