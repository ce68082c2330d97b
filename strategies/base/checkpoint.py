"""Checkpoint of a run: the server's state after the last finished round, replaced atomically.

``checkpoint/state.json`` names blobs of ``checkpoint/blobs`` by hash. It is written after the
blobs, so a crash leaves the previous checkpoint intact. It carries its own checksum
(``espalier/storage/atomic.py``). The state of the round before stays as ``previous.json``, so that
a person can go back to it if the last one is damaged. Round 0 is the end of enrolment: a site keeps
its client number even if no round was finished.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, InputError
from espalier.storage.atomic import Damaged, read_sealed, replacing, sealed, write_bytes
from espalier.storage.blobs import BlobStore

VERSION = 4
NAMED = 3
"""Maximum number of damaged blobs that an error message lists."""


class CheckpointFolder:
    """Checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self._last = root / "state.json"
        self._previous = root / "previous.json"
        self.blobs = BlobStore(
            root / "blobs", remedy="end the run and resume it; the error then names what remains"
        )

    def save(
        self,
        server_round: int,
        clients: dict[str, int],
        identity: dict[str, str],
        state: dict[str, Any],
        blobs: Collection[str] = (),
    ) -> None:
        """Save the state after a round.

        Parameters
        ----------
        server_round : finished round; 0 means that clients are enrolled and have received no
            request
        clients : client number by site
        identity : hashes of settings and model, which a resumed run must have too
        state : the strategy's state, JSON values only; large data are named by their blob hash
        blobs : hashes of all blobs that the state names
        """
        document = {
            "version": VERSION,
            "round": server_round,
            "clients": clients,
            "identity": identity,
            "state": state,
            "blobs": sorted(set(blobs)),
        }
        # The file is replaced at the end of the block. Until then the last checkpoint is untouched,
        # and its copy becomes the previous one; so a crash at any point leaves at least one intact
        # file.
        with replacing(self._last) as file:
            file.write(sealed(document))
            # A checkpoint of the same round has no new results, so the previous file stays.
            if self._last.exists() and self._round_of_last() != server_round:
                write_bytes(self._previous, self._last.read_bytes())

    def _round_of_last(self) -> int | None:
        try:
            return int(read_sealed(self._last, VERSION)["round"])
        except EspalierError:
            return None

    def load(self, identity: dict[str, str]) -> dict[str, Any] | None:
        """Return the last checkpoint; None if no client was enrolled yet.

        Raises InputError if the checkpoint or one of its blobs is damaged or missing (the message
        says what remains), or if it belongs to another version, other settings or another model.
        """
        if not self._last.exists():
            # A lost checkpoint must not look like a run that has not begun.
            if self._previous.exists():
                raise InputError(f"{self._last}: is missing; {self._remedy(self._last)}")
            return None
        try:
            document = read_sealed(self._last, VERSION)
        except Damaged as damaged:
            raise InputError(f"{damaged}; {self._remedy(self._last)}") from None
        for name, value in identity.items():
            if document["identity"].get(name) != value:
                mismatch = f"the run's {name} is not that of {self._last}"
                raise InputError(f"resume-from: {mismatch}; only deadlines and out-dir may differ")
        # Read and hash all blobs now: damage is reported before clients spend time.
        if damaged_blobs := self._damaged_blobs(document):
            raise InputError(self._error_text(document, damaged_blobs))
        return document

    def _damaged_blobs(self, document: dict[str, Any]) -> list[str]:
        return [key for key in document["blobs"] if not self.blobs.is_whole(key)]

    def _error_text(self, document: dict[str, Any], damaged: list[str]) -> str:
        """Return the error text: which blobs are damaged, what remains, and what to do."""
        files = [self.blobs.path(key) for key in damaged]
        names = ", ".join(file.name for file in files[:NAMED])
        names += f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
        of = f"of {len(document['blobs'])} blobs of the checkpoint after round {document['round']}"
        return (
            f"{self.blobs.root}: damaged or missing: {names}, {of}; the others are intact;"
            f" {self._remedy(files[0])}"
        )

    def _remedy(self, damaged: Path) -> str:
        """Return what remains of the checkpoints, and what to do, as text."""
        remedy = f"restore {damaged} from a backup, or start a new run (resume-from = '')"
        if not self._previous.exists():
            return f"no earlier round remains: {remedy}"
        try:
            before = read_sealed(self._previous, VERSION)
        except EspalierError as error:
            return f"no intact checkpoint remains ({error}): {remedy}"
        if self._damaged_blobs(before):
            return f"the checkpoint after round {before['round']} needs damaged blobs too: {remedy}"
        return (
            f"the checkpoint after round {before['round']} is intact: move {self._previous} to"
            f" {self._last} and resume again; the run continues from there, with the same result"
        )
