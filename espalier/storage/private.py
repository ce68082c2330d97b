"""A node's private state: ``<state-dir>/<lineage>/<site>/r<NNN>``.

Covers: other users of the machine cannot read it (owner-only permissions); two sites that share a state directory have each
their own; a site has one number and one set of settings in a run; two processes of one client do not write at once (a lock per
client); state of an older layout is refused; of rounds only the last two are kept, what outlasts rounds (``lasting``) is let
go by whoever put it there, and runs that nobody touched for long are removed, where a directory carries our version file. Only
an empty directory gets one: what another program keeps below a wrongly chosen state-dir is neither used nor removed.
Does not cover: encryption at rest, an attacker who has the owner's account, or two nodes under one site name on two machines.
What a site answered before is forgotten with its state, by ``keep-days`` or by its owner's hand.
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

from espalier.settings.bounded_json import read_json
from espalier.settings.lineage import is_lineage
from espalier.settings.mistakes import Mistake
from espalier.settings.node import shortened
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore, sha256

VERSION = 5
VERSION_FILE = "espalier-version.json"
"""It makes a directory ours."""
LOCK = "lock"
HELD = "held"
"""Where replies wait for an officer."""
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
        raise _unusable(root, error) from error
    return folder


def require_writable(folder: Path, key: str) -> None:
    """Raise Mistake, with the name of the ``key`` that says where it is, if this process can make no file in a directory."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Mistake(
            f"{key} = {shortened(str(folder))!r}: {error.strerror}; name a directory that this node"
            " can write, and check as its account"
        ) from error


def mark_as_ours(folder: Path, **more: Any) -> None:
    """Write the version file that lets us remove a directory, where it is empty or has one already.

    Raises
    ------
    Mistake
        Something lies there that is not ours.
    """
    others = _others(folder)  # first: who made something there meanwhile has marked it before
    if others and not is_ours(folder):
        raise Mistake(
            f"{folder}: Espalier did not make this directory, and {others[0]} lies in it; name"
            " another state-dir, or move it"
        )
    write_json(folder / VERSION_FILE, {"version": VERSION, **more}, OWNER_ONLY_FILE)


def _others(folder: Path) -> list[str]:
    """What is in a directory beside what can be there before it is marked: our lock, or an unfinished version file."""
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
    """Remove the private state of runs, and quantised models, not used since ``older_than`` (seconds since the epoch).

    Whatever else lies below a wrongly chosen ``root`` stays: only directories that carry our version file are removed.
    """
    for lock in root.glob(f"*/*/{LOCK}"):
        if lock.is_file() and lock.stat().st_mtime < older_than:
            remove_ours(lock.parent)


def remove_run(root: Path, lineage: str) -> None:
    """Remove the private state of all clients of one run, and nothing that does not carry our version file."""
    for folder in (root / lineage).glob("*"):
        remove_ours(folder)


def remove_ours(folder: Path) -> None:
    """Remove a directory that carries our version file; its parent goes too if nothing else is in it."""
    if not folder.is_symlink() and is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # only when no other client's state is in it


def is_ours(folder: Path) -> bool:
    """Whether a directory carries our version file, or is private state of version 2, which had a plainer one."""
    try:
        if (folder / VERSION_FILE).is_file():
            return isinstance(read_json((folder / VERSION_FILE).read_text()).get("version"), int)
        older = re.fullmatch("[0-9]{5}", folder.name) is not None
        return older and read_json((folder / "version.json").read_text()) == {"version": 2}
    except (OSError, ValueError, AttributeError):
        return False


def lineages_of(root: Path, site: str) -> set[str]:
    """The runs of which a site keeps state."""
    found = (file.parent.parent.name for file in root.glob(f"*/{site}/{VERSION_FILE}"))
    # A model's folder may be called as a site is.
    return {name for name in found if is_lineage(name)}


class PrivateState:
    """Private state of one site in one run (``lineage``).

    Parameters
    ----------
    root : the node's ``state-dir``
    client : what the site is asked as, and must stay in this run, by the word that an error has for it: number, settings
    """

    def __init__(
        self, root: Path, lineage: str, site: str, client: Mapping[str, str | int]
    ) -> None:
        self.root = root
        self.folder = root / lineage / site
        self.client = dict(client)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the client's lock; a second process waits until the first is done."""
        with self._lock_file() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._check_version()
            yield

    def note_asked(self) -> None:
        """Note that the site was asked to take part: the run is one of those of which it keeps state, whatever it answered.

        Nobody waits for the lock here, which somebody may hold over long work.
        """
        self.require_same_client()
        with self._lock_file():
            if not os.path.exists(self.folder / VERSION_FILE):
                mark_as_ours(self.folder, client=self.client)

    def _lock_file(self) -> IO[str]:
        """The file that is locked, opened; its time says when the site was asked last."""
        private_folder(self.root, *self._parts(self.folder))
        try:
            handle = os.open(self.folder / LOCK, os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE)
        except OSError as error:
            raise _unusable(self.root, error) from error
        os.utime(handle)
        return open(handle, "w")

    def require_same_client(self) -> None:
        """Raise Mistake if this site is known in the run under another number, or with other settings."""
        path = self.folder / VERSION_FILE
        if not os.path.exists(path):
            return
        document = _read_json(path)
        if (found := document.get("version")) != VERSION:
            raise Mistake(
                f"{self.folder}: private state of version {found}, this program writes {VERSION};"
                " remove the directory"
            )
        if not isinstance(known := document.get("client", {}), dict):
            raise _damaged(path)
        if other := [
            name for name, value in self.client.items() if known.get(name, value) != value
        ]:
            raise Mistake(
                f"message: this site takes part in this run with another {' and '.join(other)};"
                " begin a new run"
            )

    @property
    def own_model(self) -> Path:
        """Where a simulated client leaves the model that is its own, for the run's directory to get it."""
        return self.folder / "model"

    def blobs(self, server_round: int) -> BlobStore:
        """Blobs that the client keeps for one round."""
        return BlobStore(self._open(self._round(server_round)), OWNER_ONLY_FILE)

    def lasting(self) -> BlobStore:
        """Blobs that the client keeps whatever the round."""
        return BlobStore(self._open(self.folder / "lasting"), OWNER_ONLY_FILE)

    def blobs_of(self, name: str) -> BlobStore:
        """Blobs that the client keeps whatever the round, apart from others: whoever lets go of some touches no other's."""
        return BlobStore(self._open(self.folder / f"lasting-{name}"), OWNER_ONLY_FILE)

    def save(self, server_round: int, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document of a round, atomically."""
        write_json(self._open(self._round(server_round)) / f"{name}.json", value, OWNER_ONLY_FILE)

    def load(self, server_round: int, name: str) -> dict[str, Any] | None:
        """Load a JSON document of a round; None if it was never saved."""
        path = self._round(server_round) / f"{name}.json"
        return _read_json(path) if path.exists() else None

    def documents(self, server_round: int) -> dict[str, str]:
        """SHA-256 of each JSON document of a round by name: whether two moments found the same state."""
        return {
            file.stem: sha256(file.read_bytes())
            for file in sorted(self._round(server_round).glob("*.json"))
        }

    def brought(self) -> dict[str, str]:
        """SHA-256 of what a server brought for the whole run, by name: a model, and what it is used with."""
        names = [
            folder / name
            for folder in (self.folder / "lasting",)
            for name in ("model.json", "emulator.json")
        ]
        return {file.stem: sha256(file.read_bytes()) for file in names if file.exists()}

    def held(self) -> Path:
        """Where replies wait for an officer (``held.py``)."""
        return self._open(self.folder / HELD)

    def save_lasting(self, name: str, value: dict[str, Any]) -> None:
        """Save a JSON document that the client keeps whatever the round, atomically."""
        write_json(self._open(self.folder / "lasting") / f"{name}.json", value, OWNER_ONLY_FILE)

    def forget_lasting(self, name: str) -> None:
        """Remove a document of ``save_lasting``."""
        (self.folder / "lasting" / f"{name}.json").unlink(missing_ok=True)

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
        # When it was asked to take part, it had no number as yet.
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


def _damaged(path: Path) -> Mistake:
    return Mistake(f"{path}: is damaged; remove the directory {path.parent}")


def _unusable(root: Path, error: OSError) -> Mistake:
    return Mistake(
        f"state-dir = {shortened(str(root))!r}: {error.strerror}; name a directory that this node"
        " can write, with state-dir in --node-config or in the environment variable"
        " ESPALIER_STATE_DIR"
    )
