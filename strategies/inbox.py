"""The replies of one round on the server's disk: written as they arrive, read block by block in order of rank.

So a client counts whole or not at all, however its parts arrive; the server's memory holds one reply part while it
receives and one block's blob while it folds, whatever the number of clients; and what is folded never depends on who
was first.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from flwr.app import Message

from espalier.storage.atomic import write_bytes
from espalier.wire.messages import Letter, read


class Inbox:
    """Reply blobs of one round, by rank and blob key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        self._arrived: dict[int, set[int]] = {}
        self._expected: dict[int, int] = {}

    def receive(self, replies: Iterable[Message]) -> Iterator[Letter]:
        """Store the blobs of each reply, and yield the letter without them."""
        for reply in replies:
            letter = read(reply.content)
            rank = letter.header.rank
            for key, blob in letter.blobs.items():
                write_bytes(self.root / f"{rank:05d}" / key, blob)
            self._arrived.setdefault(rank, set()).add(letter.header.part)
            self._expected[rank] = letter.header.num_parts
            letter.blobs = {}
            yield letter

    def complete_ranks(self) -> list[int]:
        """Ranks of which every part has arrived, ascending."""
        return sorted(rank for rank, parts in self._arrived.items() if len(parts) == self._expected[rank])

    def blobs(self, key: str) -> Iterator[tuple[int, bytes]]:
        """One blob of every complete client, one at a time, in order of rank."""
        for rank in self.complete_ranks():
            yield rank, (self.root / f"{rank:05d}" / key).read_bytes()

    def clear(self) -> None:
        """Remove all replies."""
        shutil.rmtree(self.root, ignore_errors=True)
