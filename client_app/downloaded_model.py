"""A model that a site has from the server: its pieces are kept by hash, put together, checked, and found again by later runs.

It lies in ``<state-dir>/models/<hash of the folder>``, for its owner alone. A folder that was not used for as long as the node
keeps its runs' state is removed with them.

Covers: in a run a site takes one model, so that no question is asked again with another model or tokenizer. A real site takes a
model only if its owner says how much there may be of them (``most-model-bytes``); what was offered counts before it arrives
(``model_room``), and no more than that, and one piece, is on the disk at any time. A file is opened only after its bytes had
the hash that the folder's own hash is made of; one that was changed since is hashed again, and the model brought again if it
is another one.
Does not cover: what the model is. A site that takes one trains on whatever its server brings.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from client_app.model_room import FOUND, MODELS, reserve
from client_app.site import Site, reply_to
from espalier.settings.bounded_json import UnboundedJsonError, read_json, require_flat
from espalier.settings.mistakes import Mistake, StateLost
from espalier.storage.atomic import replacing, write_json
from espalier.storage.blobs import BlobStore, sha256
from espalier.storage.directory_lock import in_turn
from espalier.storage.private import (
    OWNER_ONLY_FILE,
    VERSION_FILE,
    PrivateState,
    mark_as_ours,
    private_folder,
)
from espalier.wire.messages import Letter, NoScalars, validate
from espalier.wire.model_folder import BYTES, PIECE, Lacking, Manifest, Offer, Piece
from espalier.wire.payload import views

MODEL = "model"
"""Document that outlasts rounds: the hash of the folder that the run works on."""
FILES = "files"
PIECES = "pieces"

Stamps = dict[str, list[int]]


def take_offer(site: Site, request: Letter) -> Letter:
    """Answer an offer: which pieces of the model are not here.

    Raises
    ------
    Mistake
        The model is larger than the site's owner allows.
    """
    manifest = validate(Offer, request.scalars).manifest()
    state = site.state(request.header)
    with state.locked():
        if offered_sha256(state) not in ("", manifest.sha256):
            raise Mistake(
                "deliver: this site was offered another model in this run; begin a new run"
            )
        reserve(site.node, manifest)
        kept = _Kept(site, manifest.sha256)
        state.save_lasting(MODEL, {"sha256": manifest.sha256, "offer": request.scalars})
    with in_turn(kept.folder):
        kept.store.keep_only(manifest.piece_sha256)  # of another cut of the same files
        if kept.is_sound():
            return reply_to(request, Lacking(pieces=[]))
        kept.remove_files()
        lacking = kept.lacking(manifest)
        if not lacking:
            kept.put_together(manifest)
    return reply_to(request, Lacking(pieces=lacking))


def take_piece(site: Site, request: Letter) -> Letter:
    """Keep a piece of the model that was offered; when all are here, its files are made and checked.

    Raises
    ------
    Mistake
        Another model was offered, or the bytes are not those.
    """
    piece = validate(Piece, request.scalars)
    state = site.state(request.header)
    offered = state.load_lasting(MODEL)
    if offered is None or offered["sha256"] != piece.model_sha256:
        raise StateLost(
            "deliver: a piece of a model came that was not offered here; offer it again"
        )
    manifest = validate(Offer, offered["offer"]).manifest()
    reserve(site.node, manifest)  # once more: what came to nothing for long was given to others
    kept = _Kept(site, piece.model_sha256)
    data = views(request.blobs[PIECE])[BYTES].tobytes()
    if piece.index >= len(manifest.piece_sha256) or len(data) != manifest.piece_size(piece.index):
        raise Mistake(f"deliver: piece {piece.index} is not of the size that was offered")
    if sha256(data) != manifest.piece_sha256[piece.index]:
        raise Mistake(f"deliver: piece {piece.index} does not have the hash that was offered")
    with in_turn(kept.folder):
        if not kept.is_sound():
            kept.make_room(manifest, len(data))
            kept.store.put(data)
            if kept.has_all(manifest):
                kept.put_together(manifest)
    return reply_to(request, NoScalars())


def downloaded_model(site: Site, state: PrivateState) -> Path:
    """Directory of the model that a run works on here, whose bytes have its hash.

    Raises
    ------
    StateLost
        It was not brought yet, or is no longer what was brought.
    """
    offered = state.load_lasting(MODEL)
    if offered is None:
        raise StateLost(
            "the run's model was not brought to this site yet, or its state was removed"
        )
    kept = _Kept(site, offered["sha256"])
    with in_turn(kept.folder):
        if not kept.is_sound():
            raise StateLost(
                "the run's model is not at this site, or its files were changed; it must be brought"
                " again"
            )
    return kept.files


class _Kept:
    """One model in the site's state directory; whoever asks holds the folder's lock."""

    def __init__(self, site: Site, folder_sha256: str) -> None:
        self.folder = private_folder(site.node.state_root(), MODELS, folder_sha256)
        if not (self.folder / VERSION_FILE).exists():
            mark_as_ours(self.folder)
        self.files = self.folder / FILES
        self.store = BlobStore(private_folder(self.folder, PIECES), OWNER_ONLY_FILE)

    def lacking(self, manifest: Manifest) -> list[int]:
        """Pieces that are not here, or damaged."""
        return [
            index
            for index, piece in enumerate(manifest.piece_sha256)
            if not self.store.is_whole(piece)
        ]

    def make_room(self, manifest: Manifest, size: int) -> None:
        """Remove pieces of other cuts of the same files, if with ``size`` bytes more there were more than the files have."""
        if self.store.num_bytes() + size > manifest.num_bytes:
            self.store.keep_only(manifest.piece_sha256)

    def remove_files(self) -> None:
        """Remove files that are not what was offered."""
        (self.folder / FOUND).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)

    def has_all(self, manifest: Manifest) -> bool:
        """Whether all pieces are here; whether they are whole, reading them tells."""
        return all(self.store.has(piece) for piece in manifest.piece_sha256)

    def is_sound(self) -> bool:
        """Whether the files are here, with the bytes that were offered."""
        found = None
        with suppress(OSError, ValueError):
            found = read_json((self.folder / FOUND).read_text())
        if found is None or not self.files.is_dir():
            return False
        manifest = validate(Offer, found["offer"]).manifest()
        if sorted(os.listdir(self.files)) != list(manifest.names):
            return False
        if self._stamps(manifest) == found["stamps"]:
            return True
        if any(
            _sha256_of(self.files / name) != wanted for name, wanted in _hashes(manifest).items()
        ):
            return False
        self._note(manifest)
        return True

    def put_together(self, manifest: Manifest) -> None:
        """Make the files of the pieces, each of which is removed when it is written.

        Raises
        ------
        Mistake
            A file does not have the hash that was offered; files and pieces are removed.
        """
        private_folder(self.folder, FILES)
        bytes_of = _Reader(self.store, manifest)
        wanted = _hashes(manifest)
        for name, size in zip(manifest.names, manifest.sizes, strict=True):
            digest = hashlib.sha256()
            with replacing(self.files / name, OWNER_ONLY_FILE) as file:
                for chunk in bytes_of.next(size):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() != wanted[name]:
                self.store.keep_only([])
                self.remove_files()
                raise Mistake(
                    f"deliver: file {name} of the model does not have the hash that was offered;"
                    " begin a new run"
                )
            self._require_flat(name)
        for surplus in set(os.listdir(self.files)) - set(manifest.names):
            (self.files / surplus).unlink()
        self._note(manifest)
        self.store.keep_only([])

    def _require_flat(self, name: str) -> None:
        """Raise Mistake, and remove all, if a file of JSON is nested so deep that whoever parses it could fail."""
        if not name.endswith(".json"):
            return
        try:
            require_flat((self.files / name).read_text(errors="replace"))
        except UnboundedJsonError as error:
            self.store.keep_only([])
            self.remove_files()
            raise Mistake(
                f"deliver: file {name} of the model cannot be used: {error}; begin a new run"
            ) from None

    def _note(self, manifest: Manifest) -> None:
        offer = Offer.of(manifest).model_dump()
        write_json(
            self.folder / FOUND, {"offer": offer, "stamps": self._stamps(manifest)}, OWNER_ONLY_FILE
        )

    def _stamps(self, manifest: Manifest) -> Stamps:
        """What changes when a file does."""
        stamps: Stamps = {}
        for name in manifest.names:
            try:
                found = os.stat(self.files / name)
            except OSError:
                continue
            stamps[name] = [found.st_ino, found.st_size, found.st_mtime_ns]
        return stamps


class _Reader:
    """The bytes of all pieces, one after the other; one piece is in memory at a time, and no longer in the store."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._pieces = self._taken(store, manifest.piece_sha256)
        self._rest = memoryview(b"")

    @staticmethod
    def _taken(store: BlobStore, pieces: Sequence[str]) -> Iterator[bytes]:
        left = Counter(pieces)  # the same piece may stand in several places
        for piece in pieces:
            data = store.get(piece)
            left[piece] -= 1
            if not left[piece]:
                store.remove(piece)
            yield data

    def next(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes, in chunks."""
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
    """Hash of the model that the run works on; empty where none was offered."""
    offered: dict[str, Any] = state.load_lasting(MODEL) or {"sha256": ""}
    return str(offered["sha256"])
