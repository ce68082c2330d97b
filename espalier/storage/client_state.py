"""Private state of a node's clients: ``<state-dir>/<lineage>/<site>/r<NNN>``.

Covers:

- Other users of the machine cannot read the state (owner-only permissions).
- Two sites that share a state directory have separate state.
- A site keeps one client number and one set of settings in a run.
- Two processes of one client do not write at the same time (one lock per client).
- State in another layout is refused.
- Only the last two rounds are kept. State that outlasts rounds (``lasting``) is deleted by the code
  that stored it.
- State of runs that were not used for a long time is deleted, but only from directories with our
  version file. Only an empty directory gets this file, so that another program's files below a
  wrong ``state-dir`` are neither used nor deleted.

Does not cover: encryption at rest, an attacker with access to the owner's account, or two nodes
with one site name on two machines. Earlier answers of a site are forgotten when its state is
deleted, by ``keep-days`` or by hand.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError
from espalier.identity.names import is_lineage
from espalier.settings.node import shortened
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore, sha256
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn, touch_lock

VERSION = 5
"""Version of the layout."""
VERSION_FILE = "espalier-version.json"
"""Name of the file that marks a directory as created by Espalier."""
WAITING = "waiting"
"""Folder of the replies that wait for approval."""
LASTING = "lasting"
"""Folder of the state that outlasts rounds."""
ROUNDS_KEPT = 2
"""Number of rounds whose state is kept."""


def private_folder(root: Path, *parts: str) -> Path:
    """Create ``root/parts...`` with owner-only permissions and return it.

    Directories that exist keep their permissions. Raises InputError if this process may not write
    there.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        # Each level is created with its mode; ``parents=True`` would ignore it.
        for depth in range(len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"state-dir = {shortened(str(root))!r}: {error.strerror}; name a directory that this"
            " node can write, with state-dir in --node-config or in the environment variable"
            " ESPALIER_STATE_DIR"
        ) from error
    return folder


def marked_folder(root: Path, *parts: str, **more: Any) -> Path:
    """Create ``root/parts...`` as ``private_folder`` does, and mark it with ``mark_as_ours``."""
    folder = private_folder(root, *parts)
    # Unlike ``Path.exists`` this is False for a path that is too long.
    if not os.path.exists(folder / VERSION_FILE):
        mark_as_ours(folder, **more)
    return folder


def mark_as_ours(folder: Path, **more: Any) -> None:
    """Write the version file, with ``more`` in it, so that Espalier may delete the directory later.

    Raises InputError if the directory holds files of another program.
    """
    # A directory without a mark may hold our lock or an unfinished version file. List the files
    # before reading the mark: another process of ours that adds files at this moment has marked the
    # directory before.
    others = sorted(
        file.name
        for file in folder.iterdir()
        if file.name != VERSION_FILE
        and not file.name.startswith(f".{VERSION_FILE}.")
        and (file.name != LOCK or file.is_dir() or file.stat().st_size)
    )
    if others and not is_ours(folder):
        raise InputError(
            f"{folder}: Espalier did not create this directory, and it contains {others[0]};"
            " name another state-dir, or move this directory"
        )
    write_json(folder / VERSION_FILE, {"version": VERSION, **more}, OWNER_ONLY_FILE)


def collect_old_runs(root: Path, older_than: float) -> None:
    """Delete client state and quantized models that were last used before ``older_than``.

    ``older_than`` is in seconds since the epoch. Only directories with our version file are
    deleted, so that other files below a wrong ``root`` stay.
    """
    # Lock files have the time of last use.
    for lock in root.glob(f"*/*/{LOCK}"):
        if lock.is_file() and lock.stat().st_mtime < older_than:
            remove_ours(lock.parent)


def remove_run(root: Path, lineage: str) -> None:
    """Delete the state of all clients of one run; directories without our version file stay."""
    for folder in (root / lineage).glob("*"):
        remove_ours(folder)


def remove_ours(folder: Path) -> None:
    """Delete a directory with our version file, and its parent if the parent is then empty."""
    # A link could lead to files of others.
    if not folder.is_symlink() and is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
        # ``rmdir`` fails if the state of another client is in the parent.
        with suppress(OSError):
            folder.parent.rmdir()


def is_ours(folder: Path) -> bool:
    """Return True if a directory has our version file."""
    try:
        return isinstance(read_json((folder / VERSION_FILE).read_text()).get("version"), int)
    except (OSError, ValueError, AttributeError):
        return False


def lineages_of(root: Path, site: str) -> set[str]:
    """Return the names of the runs for which a site has state."""
    # One folder per run and site.
    names = (file.parent.parent.name for file in root.glob(f"*/{site}/{VERSION_FILE}"))
    # The folder of a model may have the same name as the site.
    return {name for name in names if is_lineage(name)}


class PrivateState:
    """Private state of one site in the run ``lineage``, below the node's ``state-dir``.

    ``client`` is the identity of the site in this run, which must not change: its number and its
    settings. The keys are the words that an error uses for them.
    """

    def __init__(
        self, root: Path, lineage: str, site: str, client: Mapping[str, str | int]
    ) -> None:
        self.root = root
        self.folder = root / lineage / site
        self.client = dict(client)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the client's lock for the duration of the block; a second process waits.

        ``collect_old_runs`` reads the time of this use from the lock file.
        """
        # The folder must exist before its lock.
        private_folder(self.root, *self._parts())
        with in_turn(self.folder):
            stored_client = self.require_same_client()
            # ``note_asked`` may have marked the directory before the client had a number.
            if not stored_client.keys() >= self.client.keys():
                mark_as_ours(self.folder, client=stored_client | self.client)
            yield

    def note_asked(self) -> None:
        """Record that the site was asked to take part, so that the run appears in ``lineages_of``.

        The lock is not acquired, because another process may hold it during long work.
        """
        self.require_same_client()
        # Its time counts as last use, for ``keep-days``.
        touch_lock(private_folder(self.root, *self._parts()))
        self._open()

    def require_same_client(self) -> dict[str, Any]:
        """Check that the site has the same number and settings as before in this run.

        Returns the identity with which the site began the run, empty if it is new. Raises
        InputError if they differ, or if the state is damaged or of another version.
        """
        path = self.folder / VERSION_FILE
        if not os.path.exists(path):
            return {}
        document = _read_json(path)
        if (version := document.get("version")) != VERSION:
            raise InputError(
                f"{self.folder}: client state has version {version}, but this program writes"
                f" version {VERSION}; remove the directory"
            )
        if not isinstance(identity := document.get("client", {}), dict):
            raise _damaged(path)
        # Keys that are not known yet may be added, but none may change.
        if changed := [
            name for name, value in self.client.items() if identity.get(name, value) != value
        ]:
            raise InputError(
                f"message: this site takes part in this run with another {' and '.join(changed)};"
                " start a new run"
            )
        return identity

    @property
    def own_model(self) -> Path:
        """Folder in which a simulated client leaves its personal model for the run directory."""
        return self.folder / "model"

    def blobs(self, server_round: int) -> BlobStore:
        """Return the store of blobs of one round."""
        return BlobStore(self._open(_round(server_round)), OWNER_ONLY_FILE)

    def lasting(self) -> BlobStore:
        """Return the store of blobs that outlast rounds."""
        return BlobStore(self._open(LASTING), OWNER_ONLY_FILE)

    def blobs_of(self, name: str) -> BlobStore:
        """Return a separate store of blobs that outlast rounds.

        Separate stores allow one part of the program to delete its blobs without touching those of
        another.
        """
        return BlobStore(self._open(f"{LASTING}-{name}"), OWNER_ONLY_FILE)

    def waiting(self) -> Path:
        """Return the folder of replies that wait for approval (``waiting_replies.py``)."""
        return self._open(WAITING)

    def save(self, server_round: int, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document of a round atomically."""
        write_json(self._open(_round(server_round)) / f"{name}.json", value, OWNER_ONLY_FILE)

    def load(self, server_round: int, name: str) -> dict[str, Any] | None:
        """Return a JSON document of a round; None if it was never saved."""
        return self._load(_round(server_round), name)

    def save_lasting(self, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document that outlasts rounds atomically."""
        write_json(self._open(LASTING) / f"{name}.json", value, OWNER_ONLY_FILE)

    def load_lasting(self, name: str) -> dict[str, Any] | None:
        """Return a document of ``save_lasting``; None if it was never saved."""
        return self._load(LASTING, name)

    def documents(self, server_round: int) -> dict[str, str]:
        """Return the SHA-256 of each JSON document of a round, by name.

        Callers compare it to find out if the state has changed.
        """
        return _hashes(sorted((self.folder / _round(server_round)).glob("*.json")))

    def model_documents(self) -> dict[str, str]:
        """Return the SHA-256 of the documents on a pushed model and emulator, by name.

        The server pushes both for the whole run (FedSODA).
        """
        files = (self.folder / LASTING / name for name in ("model.json", "emulator.json"))
        return _hashes(file for file in files if file.exists())

    def collect_garbage(self, server_round: int) -> None:
        """Delete the state of all rounds up to ``server_round - 2``."""
        for folder in self.folder.glob("r[0-9]*"):
            # The round before may be requested again.
            if int(folder.name[1:]) <= server_round - ROUNDS_KEPT:
                shutil.rmtree(folder)

    def _open(self, *name: str) -> Path:
        """Create the folder of the client, or the folder with this name in it."""
        # Marked at the first use, so that it can be deleted later.
        marked_folder(self.root, *self._parts(), client=self.client)
        return private_folder(self.root, *self._parts(), *name)

    def _load(self, folder: str, name: str) -> dict[str, Any] | None:
        path = self.folder / folder / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def _parts(self) -> tuple[str, ...]:
        return self.folder.relative_to(self.root).parts


def _round(server_round: int) -> str:
    return f"r{server_round:03d}"


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    return {file.stem: sha256(file.read_bytes()) for file in files}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path.read_text())
    except ValueError:
        raise _damaged(path) from None
    if not isinstance(document, dict):
        raise _damaged(path)
    return document


def _damaged(path: Path) -> EspalierError:
    return InputError(f"{path}: is damaged; remove the directory {path.parent}")
