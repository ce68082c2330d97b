"""Blobs by hash: the name of a blob is the SHA-256 of its bytes."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import replacing, write_bytes

_SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


class BlobStore:
    """A directory of blobs, each in a file named by its hash."""

    def __init__(self, root: Path, mode: int = 0o644) -> None:
        self.root = root
        self._mode = mode

    def put(self, data: bytes) -> str:
        """Store a blob and return its hash; a blob that is already there is not written again."""
        key = sha256(data)
        if not self._path(key).exists():
            write_bytes(self._path(key), data, self._mode)
        return key

    def put_pieces(self, pieces: Iterable[bytes | memoryview]) -> str:
        """Store a blob that is larger than memory, piece by piece, and return its hash."""
        digest, unfinished = hashlib.sha256(), self.root / "unfinished"
        with replacing(unfinished, self._mode) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        unfinished.replace(self._path(digest.hexdigest()))
        return digest.hexdigest()

    @contextmanager
    def opened(self, key: str) -> Iterator[BinaryIO]:
        """A blob as a file, after its bytes were checked; raises as ``get`` does."""
        if not self._path(key).exists():
            raise self._missing(key)
        with open(self._path(key), "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != key:
                raise self._damaged(key)
            file.seek(0)
            yield file

    def keep_only(self, keys: Collection[str]) -> None:
        """Remove all other blobs."""
        for path in self.root.glob("*.blob"):
            if path.stem not in keys:
                path.unlink()

    def get(self, key: str) -> bytes:
        """Read a blob.

        Raises
        ------
        Mistake
            There is no such blob, or its bytes no longer have its hash.
        """
        try:
            data = self._path(key).read_bytes() if _SHA256.fullmatch(key) else None
        except FileNotFoundError:
            data = None
        if data is None:
            raise self._missing(key)
        if sha256(data) != key:
            raise self._damaged(key)
        return data

    def _missing(self, key: str) -> Mistake:
        return Mistake(f"{self.root}: there is no blob {key[:12]}; send the round's first message again")

    def _damaged(self, key: str) -> Mistake:
        return Mistake(f"{self._path(key)}: the bytes are damaged; remove the file and send the message again")

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.blob"
