"""Inbox: replies of one round on the server's disk, read block by block in client order.

A client counts completely or not at all, in whatever order its parts arrive. The server's memory
holds one part of a reply while it receives, and one blob of a block while it aggregates,
independent of the number of clients. The order of arrival has no effect on the result.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import locate
from espalier.storage.atomic import write_bytes
from pruning_kernels.votes.bitmask import LINE_WORDS, stack_of_masks

STRETCH_BYTES = 8 * 1024 * 1024
"""Bytes of all clients' masks that are read together."""
MIN_WORDS = 4096
HEADERS = 256
"""Number of headers in memory: one blob is read tensor by tensor, of all clients in turn."""
INBOX_DTYPES = {
    "U64": torch.uint64,
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Inbox:
    """Reply blobs of one round, by client and blob key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # A folder of an interrupted round would mix its parts with new ones.
        shutil.rmtree(root, ignore_errors=True)
        self._arrived: dict[int, set[int]] = {}
        self._expected: dict[int, int] = {}
        self._located = lru_cache(maxsize=HEADERS)(locate)

    def receive(self, replies: Iterable[MessageBody]) -> Iterator[MessageBody]:
        """Store the blobs of each reply, and yield it without them, so that memory is freed."""
        for body in replies:
            client = body.header.client
            # Decoded tensors are not stored: they are read from the blob again, one at a time.
            for key in body.blobs:
                write_bytes(self.root / f"{client:05d}" / key, body.blobs[key])
            self._arrived.setdefault(client, set()).add(body.header.part)
            self._expected[client] = body.header.num_parts
            # Only the file has the bytes now.
            body.blobs = {}
            yield body
            # The caller has seen the decoded tensors by now.
            body.tensors = {}

    def complete_clients(self) -> list[int]:
        """Return the clients whose parts have all arrived, in ascending order."""
        return sorted(
            client
            for client, parts in self._arrived.items()
            if len(parts) == self._expected[client]
        )

    def tensor(self, client: int, key: str, tensor: str) -> torch.Tensor:
        """Return one tensor of one client."""
        file = self.root / f"{client:05d}" / key
        offset, spec = self._located(file)[tensor]
        data = bytearray(spec.num_bytes)
        # Unbuffered: one read of exactly the tensor's bytes, without a copy.
        with open(file, "rb", buffering=0) as opened:
            opened.seek(offset)
            opened.readinto(data)
        dtype = INBOX_DTYPES[spec.dtype]
        # ``frombuffer`` does not accept an empty buffer.
        if not data:
            return torch.empty(spec.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(spec.shape)

    def words(
        self, key: str, tensor: str, clients: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Read a flat U64 tensor of several clients in stretches of bounded size.

        Yields the first word, and (clients, words) uint64 with clients in the given order. The
        array is reused for the next stretch.
        """
        files = [self.root / f"{client:05d}" / key for client in clients]
        places = [self._located(file)[tensor] for file in files]
        total = places[0][1].num_bytes // 8
        # A multiple of a cache line, because masks are counted by lines.
        at_once = max(MIN_WORDS, STRETCH_BYTES // 8 // len(files)) // LINE_WORDS * LINE_WORDS
        buffer = stack_of_masks(len(files), min(at_once, total))
        for first in range(0, total, at_once):
            stretch = buffer[:, : min(at_once, total - first)]
            for row, file, (offset, _) in zip(stretch, files, places, strict=True):
                with open(file, "rb", buffering=0) as opened:
                    opened.seek(offset + 8 * first)
                    # Read directly into the row of the buffer.
                    opened.readinto(row)
            yield first, stretch

    def clear(self) -> None:
        """Remove all replies."""
        shutil.rmtree(self.root, ignore_errors=True)
