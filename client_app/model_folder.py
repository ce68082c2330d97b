"""Folder of a model that the server pushed to this site: its pieces, its files and their check.

The pieces are stored by hash, joined to files and checked. The model is in
``<state-dir>/models/<hash of the folder>``, which only its owner can read. A folder that was not
used for as long as the node keeps the state of runs is deleted with them. A file is opened only
after its bytes matched the hash from which the folder's own hash is computed. A file that was
changed later is hashed again, and the model is downloaded again if the hash differs.

Space is reserved when a model is offered, so that offers of several runs at the same time share the
limit. Each model's folder records the number of bytes offered. The larger of that number and the
bytes on disk counts. If others need the space, an incomplete model is deleted after one hour
without messages about it.

Covers: processes of one machine that share a state directory. They take turns with a lock on
``models``.
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import UnboundedJsonError, read_json, require_flat
from espalier.errors import InputError, StateLost
from espalier.messages.blobs.model_pieces import Manifest
from espalier.settings.node import NodeSettings
from espalier.storage.atomic import replacing, write_json
from espalier.storage.blobs import BlobStore
from espalier.storage.client_state import (
    VERSION_FILE,
    PrivateState,
    marked_folder,
    private_folder,
    remove_ours,
)
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

MODELS = "models"
RESERVED = "reserved.json"
"""Name of the file in a model's folder with the number of bytes offered."""
FOUND = "found.json"
"""Name of the file in a model's folder with the offer, and the stamps of the checked files."""
ABANDONED_SECONDS = 3600
"""Seconds until an incomplete model is abandoned; longer than a server waits for an answer."""


def reserve(node: NodeSettings, manifest: Manifest) -> None:
    """Reserve space for a model, if it has none yet.

    Raises InputError if the model exceeds the owner's limit, alone or together with the models that
    are stored or offered here.
    """
    max_bytes = node.max_bytes_of_models()
    # The limit applies to one model and to the sum of all.
    num_bytes = manifest.num_bytes
    if max_bytes is not None and num_bytes > max_bytes:
        raise InputError(
            f"max-model-bytes = {max_bytes}: the run's model has {num_bytes} bytes, more than this"
            " site's owner allows; raise the limit in --node-config"
        )
    models = private_folder(node.state_root(), MODELS)
    folder = models / manifest.sha256
    # One process at a time: two runs must not reserve the same space.
    with in_turn(models):
        # Room is made only if it is needed.
        if max_bytes is not None and _used_by_others(folder) + num_bytes > max_bytes:
            _remove_abandoned(folder)
        if max_bytes is not None and (taken := _used_by_others(folder)) + num_bytes > max_bytes:
            raise InputError(
                f"max-model-bytes = {max_bytes}: models of other runs use or have reserved {taken}"
                f" bytes, so there is no room for this model of {num_bytes} bytes; raise the limit"
                " in --node-config, or remove models below models/ in the site's state-dir"
            )
        marked_folder(models, manifest.sha256)
        # Taking the folder's lock updates the time of last use.
        with in_turn(folder):
            if not (folder / RESERVED).exists():
                # Readable for the owner only, as everything in the state directory.
                write_json(folder / RESERVED, {"bytes": num_bytes}, OWNER_ONLY_FILE)


def _used_by_others(model_folder: Path) -> int:
    """Return the number of bytes that other models use or have reserved."""
    return sum(
        _taken(folder)
        for folder in model_folder.parent.iterdir()
        if folder.is_dir() and folder != model_folder
    )


def _taken(folder: Path) -> int:
    reserved = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        reserved = int(read_json((folder / RESERVED).read_text())["bytes"])
    there = 0
    for file in folder.rglob("*"):
        # Another process may have joined the pieces to a file meanwhile.
        with suppress(OSError):
            there += file.stat().st_size if file.is_file() and file.name not in OUR_OWN else 0
    # What was announced counts, even if fewer bytes have arrived.
    return max(reserved, there)


OUR_OWN = (RESERVED, FOUND, VERSION_FILE, LOCK)
"""Names of files in a model's folder that no server sent."""


def _remove_abandoned(model_folder: Path) -> None:
    """Delete incomplete models without messages for ``ABANDONED_SECONDS``."""
    for folder in model_folder.parent.iterdir():
        lock = folder / LOCK
        # Complete models, the own one, and folders that are just being made stay.
        if (
            folder == model_folder
            or not folder.is_dir()
            or (folder / FOUND).exists()
            or not lock.exists()
        ):
            continue
        if lock.stat().st_mtime < time.time() - ABANDONED_SECONDS:
            remove_ours(folder)


MODEL = "model"
"""Name of a document that outlives rounds: hash of the folder of the run's model."""
FILES = "files"
PIECES = "pieces"

Stamps = dict[str, list[int]]


def downloaded_model(state_root: Path, state: PrivateState) -> Path:
    """Return the directory of the run's model; its files have the hashes in the offer.

    Raises StateLost if the model was not downloaded yet, or its files were changed.
    """
    offered = state.load_lasting(MODEL)
    if offered is None:
        raise StateLost(
            "the run's model has not been sent to this site yet, or its state was removed"
        )
    # Each process takes the folder's lock: another one may be joining the pieces.
    kept = ModelFolder(state_root, offered["sha256"])
    with in_turn(kept.folder):
        if not kept.is_sound():
            raise StateLost(
                "the run's model is not at this site, or its files were changed; the server"
                " must send it again"
            )
    return kept.files


class ModelFolder:
    """Model in the site's state directory. Callers hold the folder's lock."""

    def __init__(self, state_root: Path, folder_sha256: str) -> None:
        self.folder = marked_folder(state_root, MODELS, folder_sha256)
        self.files = self.folder / FILES
        self.store = BlobStore(private_folder(self.folder, PIECES), OWNER_ONLY_FILE)

    def lacking(self, manifest: Manifest) -> list[int]:
        """Return the indices of pieces that are missing or damaged."""
        return [
            index
            for index, piece in enumerate(manifest.piece_sha256)
            if not self.store.is_whole(piece)
        ]

    def remove_files(self) -> None:
        """Delete the files and the record that they were checked."""
        (self.folder / FOUND).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)

    def is_sound(self) -> bool:
        """Return whether the files exist and have the offered bytes."""
        record = None
        # A damaged record means that the files are checked in another way: they are sent again.
        with suppress(OSError, ValueError):
            record = read_json((self.folder / FOUND).read_text())
        if record is None or not self.files.is_dir():
            return False
        manifest = Manifest.offered(record["offer"])
        # An additional file could be loaded by a library, for instance code.
        if sorted(os.listdir(self.files)) != manifest.names:
            return False
        # Hashing a whole model takes long, so it is skipped while inode, size and time are
        # unchanged.
        if self._stamps(manifest) == record["stamps"]:
            return True
        # Something changed, so the bytes decide.
        if any(
            _sha256_of(self.files / name) != digest for name, digest in _hashes(manifest).items()
        ):
            return False
        self._note(manifest)
        return True

    def put_together(self, manifest: Manifest) -> None:
        """Join the pieces to files, and delete each piece when it is written.

        Raises
        ------
        InputError
            A file does not have the offered hash, or is JSON that is nested too deeply. Files and
            pieces are deleted.
        """
        private_folder(self.folder, FILES)
        bytes_of = _Reader(self.store, manifest)
        hashes = _hashes(manifest)
        for name, size in zip(manifest.names, manifest.sizes, strict=True):
            digest = hashlib.sha256()
            # Written under a temporary name; a crash leaves no half file.
            with replacing(self.files / name, OWNER_ONLY_FILE) as file:
                for chunk in bytes_of.next(size):
                    digest.update(chunk)
                    file.write(chunk)
            # Damaged or forged: nothing of it may stay.
            if digest.hexdigest() != hashes[name]:
                self.store.keep_only([])
                self.remove_files()
                raise InputError(
                    f"push: file {name} of the model differs from the announced hash; start a"
                    " new run"
                )
            self._require_flat(name)
        # Files of an interrupted attempt with another offer.
        for surplus in set(os.listdir(self.files)) - set(manifest.names):
            (self.files / surplus).unlink()
        # Only now do the files count as checked.
        self._note(manifest)
        self.store.keep_only([])

    def _require_flat(self, name: str) -> None:
        """Raise InputError and delete everything if a JSON file is nested too deeply to parse."""
        if not name.endswith(".json"):
            return
        try:
            require_flat((self.files / name).read_text(errors="replace"))
        except UnboundedJsonError as error:
            self.store.keep_only([])
            self.remove_files()
            raise InputError(
                f"push: file {name} of the model cannot be used: {error}; start a new run"
            ) from None

    def _note(self, manifest: Manifest) -> None:
        offer = manifest.model_dump()
        write_json(
            self.folder / FOUND, {"offer": offer, "stamps": self._stamps(manifest)}, OWNER_ONLY_FILE
        )

    def _stamps(self, manifest: Manifest) -> Stamps:
        """Return inode, size and modification time (ns) of each file that exists."""
        stamps: Stamps = {}
        for name in manifest.names:
            # A missing file has no stamp, so the comparison fails.
            try:
                status = os.stat(self.files / name)
            except OSError:
                continue
            stamps[name] = [status.st_ino, status.st_size, status.st_mtime_ns]
        return stamps


class _Reader:
    """Byte stream over all pieces.

    One piece is in memory at a time. It is deleted from the store as soon as it is read.
    """

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._pieces = self._taken(store, manifest.piece_sha256)
        self._rest = memoryview(b"")

    @staticmethod
    def _taken(store: BlobStore, pieces: Sequence[str]) -> Iterator[bytes]:
        # The same piece may occur several times, so it is deleted at its last use.
        left = Counter(pieces)
        for piece in pieces:
            data = store.get(piece)
            left[piece] -= 1
            if not left[piece]:
                store.remove(piece)
            yield data

    def next(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in chunks."""
        while size:
            if not self._rest:
                self._rest = memoryview(next(self._pieces))
            chunk = self._rest[:size]
            self._rest = self._rest[size:]
            size -= len(chunk)
            yield chunk


def _hashes(manifest: Manifest) -> Mapping[str, str]:
    return dict(zip(manifest.names, manifest.file_sha256, strict=True))


def _sha256_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def offered_sha256(state: PrivateState) -> str:
    """Return the hash of the run's model; empty before the server offers one."""
    offered: dict[str, Any] = state.load_lasting(MODEL) or {"sha256": ""}
    return str(offered["sha256"])
