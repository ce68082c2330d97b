"""Private state of a node's clients: ``<state-dir>/<lineage>/<site>/r<NNN>``.

Covers:

- Other users of the machine cannot read the state (owner-only permissions).
- Two sites that share a state directory have separate state.
- A site keeps one client number and one set of settings in a run.
- Two processes of one client do not write at the same time (one lock per client).
- State in an older layout is refused.
- Only the last two rounds are kept. State that outlasts rounds (``lasting``) is deleted by the code
  that stored it.
- State of runs that were not used for a long time is deleted, but only from directories with our
  version file. Only an empty directory gets this file, so that another program's files below a
  wrong ``state-dir`` are neither used nor deleted.

Does not cover: encryption at rest, an attacker with access to the owner's account, or two nodes
with one site name on two machines. Earlier answers of a site are forgotten when its state is
deleted, by ``keep-days`` or by hand.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError
from espalier.identity.names import is_lineage
from espalier.settings.node import shortened
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore, sha256

VERSION = 5
"""Version of the layout."""
VERSION_FILE = "espalier-version.json"
"""Name of the file that marks a directory as created by Espalier."""
LOCK = "lock"
HELD = "held"
"""Folder of the replies that wait for approval."""
OWNER_ONLY_DIRECTORY = 0o700
OWNER_ONLY_FILE = 0o600
ROUNDS_KEPT = 2
"""Number of rounds whose state is kept."""


def private_folder(root: Path, *parts: str) -> Path:
    """Create ``root/parts...`` with owner-only permissions and return it.

    Directories that exist keep their permissions.

    Raises
    ------
    InputError
        If this process may not write there.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for depth in range(len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(mode=OWNER_ONLY_DIRECTORY, exist_ok=True)
    except OSError as error:
        raise _unusable(root, error) from error
    return folder


def require_writable(folder: Path, key: str) -> None:
    """Check that this process can create a file in a directory.

    Parameters
    ----------
    folder
        The directory.
    key
        Name of the setting that names the directory, for the error.

    Raises
    ------
    InputError
        If no file can be created.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{key} = {shortened(str(folder))!r}: {error.strerror}; name a directory that this"
            " node can write, and run this check as the node's user"
        ) from error


def mark_as_ours(folder: Path, **more: Any) -> None:
    """Write the version file, which allows Espalier to delete the directory later.

    Parameters
    ----------
    folder
        A directory that is empty or already has a version file.
    more
        Further values for the version file.

    Raises
    ------
    InputError
        If the directory holds files of another program.
    """
    # List the files before reading the mark: another process of ours that adds files at this
    # moment has marked the directory before.
    others = _others(folder)
    if others and not is_ours(folder):
        raise InputError(
            f"{folder}: Espalier did not create this directory, and it contains {others[0]};"
            " name another state-dir, or move this directory"
        )
    write_json(folder / VERSION_FILE, {"version": VERSION, **more}, OWNER_ONLY_FILE)


def _others(folder: Path) -> list[str]:
    """Return the names of foreign files in a directory.

    A directory without a mark may hold our lock or an unfinished version file; these are not
    foreign.
    """
    names = [
        name
        for name in os.listdir(folder)
        if name != VERSION_FILE and not name.startswith(f".{VERSION_FILE}.")
    ]
    return sorted(
        name
        for name in names
        if name != LOCK or (folder / name).is_dir() or (folder / name).stat().st_size
    )


def collect_old_runs(root: Path, older_than: float) -> None:
    """Delete client state and quantized models that were last used before ``older_than``.

    ``older_than`` is in seconds since the epoch. Only directories with our version file are
    deleted, so that other files below a wrong ``root`` stay.
    """
    for lock in root.glob(f"*/*/{LOCK}"):
        if lock.is_file() and lock.stat().st_mtime < older_than:
            remove_ours(lock.parent)


def remove_run(root: Path, lineage: str) -> None:
    """Delete the state of all clients of one run; directories without our version file stay."""
    for folder in (root / lineage).glob("*"):
        remove_ours(folder)


def remove_ours(folder: Path) -> None:
    """Delete a directory with our version file, and its parent if the parent is then empty."""
    if not folder.is_symlink() and is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
        # ``rmdir`` fails if the state of another client is in the parent.
        with suppress(OSError):
            folder.parent.rmdir()


def is_ours(folder: Path) -> bool:
    """Return True if a directory has our version file, or is client state of layout version 2."""
    try:
        if (folder / VERSION_FILE).is_file():
            return isinstance(read_json((folder / VERSION_FILE).read_text()).get("version"), int)
        # Version 2 named directories by a number and had a file with only the version.
        older = re.fullmatch("[0-9]{5}", folder.name) is not None
        return older and read_json((folder / "version.json").read_text()) == {"version": 2}
    except (OSError, ValueError, AttributeError):
        return False


def lineages_of(root: Path, site: str) -> set[str]:
    """Return the names of the runs for which a site has state."""
    found = (file.parent.parent.name for file in root.glob(f"*/{site}/{VERSION_FILE}"))
    # The folder of a model may have the same name as the site.
    return {name for name in found if is_lineage(name)}


class PrivateState:
    """Private state of one site in one run.

    Parameters
    ----------
    root
        The node's ``state-dir``.
    lineage
        Name of the run.
    site
        Name of the site.
    client
        Identity of the site in this run, which must not change: its number and its settings. The
        keys are the words that an error uses for them.
    """

    def __init__(
        self, root: Path, lineage: str, site: str, client: Mapping[str, str | int]
    ) -> None:
        self.root = root
        self.folder = root / lineage / site
        self.client = dict(client)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the client's lock for the duration of the block; a second process waits."""
        with self._lock_file() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._check_version()
            yield

    def note_asked(self) -> None:
        """Record that the site was asked to take part, so that the run appears in ``lineages_of``.

        The lock is not acquired, because another process may hold it during long work.
        """
        self.require_same_client()
        with self._lock_file():
            if not os.path.exists(self.folder / VERSION_FILE):
                mark_as_ours(self.folder, client=self.client)

    def _lock_file(self) -> IO[str]:
        """Open the lock file; its modification time is the time of the last request."""
        private_folder(self.root, *self._parts(self.folder))
        try:
            handle = os.open(self.folder / LOCK, os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE)
        except OSError as error:
            raise _unusable(self.root, error) from error
        # ``collect_old_runs`` reads this time.
        os.utime(handle)
        return open(handle, "w")

    def require_same_client(self) -> None:
        """Check that the site has the same number and settings as before in this run.

        Raises
        ------
        InputError
            If they differ, or if the state is damaged or of another version.
        """
        path = self.folder / VERSION_FILE
        if not os.path.exists(path):
            return
        document = _read_json(path)
        if (found := document.get("version")) != VERSION:
            raise InputError(
                f"{self.folder}: client state has version {found}, but this program writes"
                f" version {VERSION}; remove the directory"
            )
        if not isinstance(known := document.get("client", {}), dict):
            raise _damaged(path)
        if other := [
            name for name, value in self.client.items() if known.get(name, value) != value
        ]:
            raise InputError(
                f"message: this site takes part in this run with another {' and '.join(other)};"
                " start a new run"
            )

    @property
    def own_model(self) -> Path:
        """Folder in which a simulated client leaves its personal model for the run directory."""
        return self.folder / "model"

    def blobs(self, server_round: int) -> BlobStore:
        """Return the store of blobs of one round."""
        return BlobStore(self._open(self._round(server_round)), OWNER_ONLY_FILE)

    def lasting(self) -> BlobStore:
        """Return the store of blobs that outlast rounds."""
        return BlobStore(self._open(self.folder / "lasting"), OWNER_ONLY_FILE)

    def blobs_of(self, name: str) -> BlobStore:
        """Return a separate store of blobs that outlast rounds.

        Separate stores allow one part of the program to delete its blobs without touching those of
        another.
        """
        return BlobStore(self._open(self.folder / f"lasting-{name}"), OWNER_ONLY_FILE)

    def save(self, server_round: int, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document of a round atomically."""
        write_json(self._open(self._round(server_round)) / f"{name}.json", value, OWNER_ONLY_FILE)

    def load(self, server_round: int, name: str) -> dict[str, Any] | None:
        """Return a JSON document of a round; None if it was never saved."""
        path = self._round(server_round) / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def documents(self, server_round: int) -> dict[str, str]:
        """Return the SHA-256 of each JSON document of a round, by name.

        Callers compare it to find out if the state has changed.
        """
        return {
            file.stem: sha256(file.read_bytes())
            for file in sorted(self._round(server_round).glob("*.json"))
        }

    def brought(self) -> dict[str, str]:
        """Return the SHA-256 of the documents on a pushed model and emulator, by name.

        The server pushes both for the whole run (FedSODA).
        """
        names = [
            folder / name
            for folder in (self.folder / "lasting",)
            for name in ("model.json", "emulator.json")
        ]
        return {file.stem: sha256(file.read_bytes()) for file in names if file.exists()}

    def held(self) -> Path:
        """Return the folder of replies that wait for approval (``waiting_replies.py``)."""
        return self._open(self.folder / HELD)

    def save_lasting(self, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document that outlasts rounds atomically."""
        write_json(self._open(self.folder / "lasting") / f"{name}.json", value, OWNER_ONLY_FILE)

    def load_lasting(self, name: str) -> dict[str, Any] | None:
        """Return a document of ``save_lasting``; None if it was never saved."""
        path = self.folder / "lasting" / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def collect_garbage(self, server_round: int) -> None:
        """Delete the state of all rounds up to ``server_round - 2``."""
        for folder in self.folder.glob("r[0-9]*"):
            if int(folder.name[1:]) <= server_round - ROUNDS_KEPT:
                shutil.rmtree(folder)

    def _round(self, server_round: int) -> Path:
        return self.folder / f"r{server_round:03d}"

    def _open(self, folder: Path) -> Path:
        private_folder(self.root, *self._parts(self.folder))
        if not os.path.exists(self.folder / VERSION_FILE):
            mark_as_ours(self.folder, client=self.client)
        return private_folder(self.root, *self._parts(folder))

    def _parts(self, folder: Path) -> tuple[str, ...]:
        return folder.relative_to(self.root).parts

    def _check_version(self) -> None:
        self.require_same_client()
        path = self.folder / VERSION_FILE
        known = _read_json(path).get("client", {}) if os.path.exists(path) else {}
        # ``note_asked`` may have marked the directory before the client had a number.
        if not known.keys() >= self.client.keys():
            mark_as_ours(self.folder, client=known | self.client)


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


def _unusable(root: Path, error: OSError) -> EspalierError:
    return InputError(
        f"state-dir = {shortened(str(root))!r}: {error.strerror}; name a directory that this node"
        " can write, with state-dir in --node-config or in the environment variable"
        " ESPALIER_STATE_DIR"
    )
