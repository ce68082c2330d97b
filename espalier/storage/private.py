"""A node's private state: ``<state-dir>/<lineage>/<rank>/r<NNN>``.

Covers: other users of the machine cannot read it (owner-only permissions); two processes of one client do not write at
once (a lock per client); state of an older layout is refused; of rounds only the last two are kept, what outlasts rounds
(``lasting``) is let go by whoever put it there, and runs that nobody touched for long are removed.
Does not cover: encryption at rest, or an attacker who has the owner's account.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore

VERSION = 2
OWNER_ONLY_DIRECTORY = 0o700
OWNER_ONLY_FILE = 0o600
ROUNDS_KEPT = 2


def private_folder(root: Path, *parts: str) -> Path:
    """Make ``root/parts...`` for its owner alone, and return it; directories that exist keep their permissions.

    Raises
    ------
    Mistake
        This process may not write there.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for depth in range(len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(mode=OWNER_ONLY_DIRECTORY, exist_ok=True)
    except OSError as error:
        raise Mistake(f"state-dir = {str(root)!r}: {error.strerror}; name a directory that this node can write") from error
    return folder


def collect_old_runs(root: Path, older_than: float) -> None:
    """Remove the private state of runs, and quantised models, not used since ``older_than`` (seconds since the epoch)."""
    for lock in root.glob("*/*/lock"):
        if lock.stat().st_mtime < older_than:
            shutil.rmtree(lock.parent)
            with suppress(OSError):
                lock.parent.parent.rmdir()  # only when no other client's state is in it


class PrivateState:
    """Private state of one client (``rank``) in one run (``lineage``)."""

    def __init__(self, root: Path, lineage: str, rank: int) -> None:
        self.root = root
        self.folder = root / lineage / f"{rank:05d}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the client's lock; a second process waits until the first is done."""
        self._open(self.folder)
        with open(os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE), "w") as file:
            os.utime(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX)
            self._check_version()
            yield

    def blobs(self, server_round: int) -> BlobStore:
        """Blobs that the client keeps for one round."""
        return BlobStore(self._open(self._round(server_round)), OWNER_ONLY_FILE)

    def lasting(self) -> BlobStore:
        """Blobs that the client keeps whatever the round."""
        return BlobStore(self._open(self.folder / "lasting"), OWNER_ONLY_FILE)

    def save(self, server_round: int, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document of a round, atomically."""
        write_json(self._open(self._round(server_round)) / f"{name}.json", value, OWNER_ONLY_FILE)

    def load(self, server_round: int, name: str) -> dict[str, Any] | None:
        """Load a JSON document of a round; None if it was never saved."""
        path = self._round(server_round) / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def save_lasting(self, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document that the client keeps whatever the round, atomically."""
        write_json(self._open(self.folder / "lasting") / f"{name}.json", value, OWNER_ONLY_FILE)

    def load_lasting(self, name: str) -> dict[str, Any] | None:
        """Load a document of ``save_lasting``; None if it was never saved."""
        path = self.folder / "lasting" / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def collect_garbage(self, server_round: int) -> None:
        """Remove rounds older than the last two, counted from ``server_round``."""
        for folder in self.folder.glob("r[0-9]*"):
            if int(folder.name[1:]) <= server_round - ROUNDS_KEPT:
                shutil.rmtree(folder)

    def _round(self, server_round: int) -> Path:
        return self.folder / f"r{server_round:03d}"

    def _open(self, folder: Path) -> Path:
        return private_folder(self.root, *folder.relative_to(self.root).parts)

    def _check_version(self) -> None:
        path = self.folder / "version.json"
        if not path.exists():
            write_json(path, {"version": VERSION}, OWNER_ONLY_FILE)
        elif (found := _read_json(path).get("version")) != VERSION:
            raise Mistake(
                f"{self.folder}: private state of version {found}, this program writes {VERSION}; remove the directory"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        raise Mistake(f"{path}: is damaged; remove the directory {path.parent}") from None
    return document
