"""The hidden states of all windows between two blocks, batch by batch: in memory, or spilled to a file without a name.

Covers: nobody else can open a spilled file, since no directory lists it, and the system removes it with the process, also
when that is killed.
Does not cover: who reads the disk itself; hidden states are not encrypted.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from espalier.errors import Mistake


class HiddenStates(Protocol):
    """Batches of shape (windows, tokens, hidden size), all but the last with equally many windows."""

    def emptied(self) -> "HiddenStates":
        """Another of the kind, without any batch."""

    def append(self, batch: Tensor) -> None:
        """Add a batch after the others."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor: ...

    def __setitem__(self, index: int, batch: Tensor) -> None: ...


def hidden_states(folder: Path | None) -> HiddenStates:
    """Where hidden states are kept: in memory, or in a file on the disk of a folder."""
    return InMemory() if folder is None else OnDisk(folder)


class InMemory:
    """Batches stay where they were computed; a new value takes the old one's place without a second copy."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def emptied(self) -> "InMemory":
        """Another of the kind, without any batch."""
        return InMemory()

    def append(self, batch: Tensor) -> None:
        """Add a batch after the others."""
        self._batches.append(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index]

    def __setitem__(self, index: int, batch: Tensor) -> None:
        self._batches[index].copy_(batch)


class OnDisk:
    """Batches are in a file; only the one in hand is in memory.

    Parameters
    ----------
    folder : on whose disk the file is; it must exist
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._refusals_explained():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, it lives as long as this object
        self._shapes: list[torch.Size] = []
        self._like = torch.empty(0)

    def emptied(self) -> "OnDisk":
        """Another of the kind, without any batch."""
        return OnDisk(self.folder)

    def append(self, batch: Tensor) -> None:
        """Add a batch after the others."""
        self._like = batch.new_empty(0)
        self._shapes.append(batch.shape)
        self[len(self) - 1] = batch

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:
        batch = torch.empty(self._shapes[index], dtype=self._like.dtype)
        waiting = memory_of(batch)
        place = self._place(index)
        while waiting:
            read = os.preadv(self._file.fileno(), [waiting], place)
            if not read:
                raise Mistake(
                    f"{self.folder}: the file of the hidden states is too short; send the message"
                    " again"
                )
            waiting = waiting[read:]
            place = place + read
        return batch.to(self._like.device)

    def __setitem__(self, index: int, batch: Tensor) -> None:
        waiting = memory_of(batch.cpu())
        place = self._place(index)
        with self._refusals_explained():
            while waiting:
                written = os.pwrite(self._file.fileno(), waiting, place)
                waiting = waiting[written:]
                place = place + written

    def _place(self, index: int) -> int:
        return index * self._shapes[0].numel() * self._like.element_size()

    @contextmanager
    def _refusals_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise Mistake(
                f"cannot keep hidden states in {self.folder}: {reason}; free the disk or set"
                " activations to 'memory'"
            ) from error


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; no copy if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
