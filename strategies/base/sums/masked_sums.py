"""Masked sums of a run on disk: ``secure-sum/`` in the run directory.

A masked sum is written before any client is asked for shares. Clients help to unmask one sum per
round, so a resumed run must ask them for the same one; they then give the same answers. The sums of
the last two rounds are kept, because a person may go back to the checkpoint of the round before.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.errors import InputError
from espalier.messages.message import validate
from espalier.messages.sums.secure_sum import ShareOrder, UnmaskOrder
from espalier.secure_sum.neighbours import neighbours
from espalier.storage.atomic import Damaged, read_sealed, sealed, write_bytes
from espalier.storage.blobs import BlobStore

VERSION = 1
"""Version of the documents."""
ROUNDS_KEPT = 2
"""Number of rounds whose sums are kept."""


@dataclass(frozen=True)
class MaskedSum:
    """Sum of masked summands that is to be unmasked, with all that is needed to do so."""

    server_round: int
    # The encrypted shares themselves are only for their receivers.
    order: dict[str, Any]
    """Fields of the request for shares: session, threshold and keys."""
    members: list[int]
    """Clients that sent shares."""
    shared: dict[str, dict[str, Any]]
    """Reply with shares of each member, without the encrypted shares."""
    included: list[int]
    """Clients whose masked summands are in the sum."""
    reports: dict[str, dict[str, Any]]
    """Report of the work of each client in the sum."""
    totals: dict[str, str]
    """Hash of the packed masked sums, by blob key."""
    seats: list[dict[str, Any]] = field(default_factory=list)
    traffic: list[list[int]] = field(default_factory=list)
    """State of roster and byte ledger at this point, as in a checkpoint.

    A resumed run does not repeat what came before, and counts it once.
    """

    @cached_property
    def keys(self) -> ShareOrder:
        """Session, threshold and keys of all clients."""
        return validate(ShareOrder, self.order)

    @cached_property
    def graph(self) -> dict[int, list[int]]:
        """Neighbours of each client."""
        return neighbours(self.keys.keys(), self.keys.neighbourhood.degree)

    @cached_property
    def dropped(self) -> list[int]:
        """Members whose masked summands are missing."""
        return [client for client in self.members if client not in self.included]

    def holders(self, client: int) -> list[int]:
        """Return the holders of a client's shares, ascending; the client is one of them."""
        return sorted([*self.graph[client], client])

    def request(self, holder: int, tags: Mapping[int, str]) -> UnmaskOrder:
        """Return the request for a holder's shares.

        Parameters
        ----------
        tags : tag for the holder of each other client that confirmed the list of the sum
        """
        # For each neighbour one of two secrets, never both: the seed if it is in the sum, else its
        # key.
        owners = self.holders(holder)
        return UnmaskOrder(
            session=self.keys.session,
            included=self.included,
            seeds_of=[client for client in owners if client in self.included],
            keys_of=[client for client in self.graph[holder] if client in self.dropped],
            confirmed=sorted(tags),
            tags=[tags[client] for client in sorted(tags)],
        )


class MaskedSums:
    """Masked sums of the last rounds, each in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def blobs(self, server_round: int) -> BlobStore:
        """Return the store of a round's sums."""
        return BlobStore(self._folder(server_round), remedy="start a new run")

    def save(self, masked: MaskedSum) -> None:
        """Write a sum whose blobs are stored, and delete those of earlier rounds."""
        document = {"version": VERSION, **asdict(masked)}
        # ``sealed`` adds a checksum, because a wrong sum would be noticed only in the result.
        write_bytes(self._document(masked.server_round), sealed(document))
        # Two rounds stay, see above.
        for folder in self._root.glob("r[0-9]*"):
            if int(folder.name[1:]) <= masked.server_round - ROUNDS_KEPT:
                shutil.rmtree(folder, ignore_errors=True)

    def load(self, server_round: int) -> MaskedSum | None:
        """Return the sum of a round; None if there is none, and InputError if it is damaged."""
        path = self._document(server_round)
        if not path.exists():
            return None
        try:
            document = read_sealed(path, VERSION)
        except Damaged as damaged:
            raise InputError(
                f"{damaged}; clients help to unmask one sum per round, so restore it from a backup,"
                " or start a new run (resume-from = '')"
            ) from None
        return MaskedSum(**{name: value for name, value in document.items() if name != "version"})

    def clear(self) -> None:
        """Delete all sums."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _document(self, server_round: int) -> Path:
        return self._folder(server_round) / "masked-sum.json"

    def _folder(self, server_round: int) -> Path:
        return self._root / f"r{server_round:03d}"
