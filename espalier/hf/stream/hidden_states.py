"""Hidden states of all samples between two blocks, batch by batch, in memory or on disk.

On disk they are in a file without a name.

Covers: no other process can open the file, because no directory lists it. The kernel deletes it
when the process ends, even if the process is killed.

Does not cover: an attacker who reads the disk itself; hidden states are not encrypted.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.files.checkpoint import bits_of


class HiddenStates:
    """Batches of shape (samples, sequence_length, hidden_size), on the device of their computation.

    All batches but the last have the same number of samples. Assignment copies in place.
    """

    folder: Path | None = None
    """Folder on whose disk the batches are; None if they are in memory."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []

    def append(self, batch: Tensor) -> None:
        """Add a batch at the end."""
        self._batches.append(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        return self._batches[index]

    def __setitem__(self, index: int, batch: Tensor) -> None:
        self._batches[index].copy_(batch)


class OnDisk(HiddenStates):
    """Batches in a file, in the existing directory ``folder``; only one batch is in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._refusals_explained():
            # The file stays open as long as this object lives.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._shapes: list[torch.Size] = []
        self._like = torch.empty(0)

    def append(self, batch: Tensor) -> None:
        # Dtype and device of all batches.
        self._like = batch.new_empty(0)
        self._shapes.append(batch.shape)
        self[len(self) - 1] = batch

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:
        batch = torch.empty(self._shapes[index], dtype=self._like.dtype)
        remaining = memory_of(batch)
        offset = self._place(index)
        while remaining:
            # One call may read less than requested.
            num_read = os.preadv(self._file.fileno(), [remaining], offset)
            if not num_read:
                raise InputError(
                    f"{self.folder}: the file of the hidden states is too short; send the message"
                    " again"
                )
            remaining = remaining[num_read:]
            offset = offset + num_read
        return batch.to(self._like.device)

    def __setitem__(self, index: int, batch: Tensor) -> None:
        remaining = memory_of(batch.cpu())
        offset = self._place(index)
        with self._refusals_explained():
            while remaining:
                num_written = os.pwrite(self._file.fileno(), remaining, offset)
                remaining = remaining[num_written:]
                offset = offset + num_written

    def _place(self, index: int) -> int:
        # All batches but the last have the size of the first.
        return index * self._shapes[0].numel() * self._like.element_size()

    @contextmanager
    def _refusals_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"cannot store hidden states in {self.folder}: {reason}; free some disk space,"
                " or set activations to 'memory'"
            ) from error


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor as a memory view, without a copy if it is contiguous."""
    return bits_of(tensor.detach()).numpy().data


def hidden_states(folder: Path | None) -> HiddenStates:
    """Return a container in memory, or on the disk of ``folder`` if it is given."""
    return HiddenStates() if folder is None else OnDisk(folder)
