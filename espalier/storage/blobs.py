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
    """A directory of blobs, each in a file named by its hash.

    Parameters
    ----------
    root : the directory
    mode : permissions of the files
    remedy : what to do about a blob that is damaged or missing
    """

    def __init__(
        self, root: Path, mode: int = 0o644, remedy: str = "send the round's first message again"
    ) -> None:
        self.root = root
        self._mode = mode
        self._remedy = remedy

    def put(self, data: bytes) -> str:
        """Store a blob and return its hash; a blob that is already there, and whole, is not written again."""
        key = sha256(data)
        if not self.is_whole(key):
            write_bytes(self.path(key), data, self._mode)
        return key

    def is_whole(self, key: str) -> bool:
        """Whether a blob is there, with the bytes that it was stored with."""
        try:
            with open(self.path(key), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == key
        except OSError:
            return False

    def put_pieces(self, pieces: Iterable[bytes | memoryview]) -> str:
        """Store a blob that is larger than memory, piece by piece, and return its hash."""
        digest = hashlib.sha256()
        unfinished = self.root / "unfinished"
        with replacing(unfinished, self._mode) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        unfinished.replace(self.path(digest.hexdigest()))
        return digest.hexdigest()

    @contextmanager
    def opened(self, key: str) -> Iterator[BinaryIO]:
        """A blob as a file, after its bytes were checked; raises as ``get`` does."""
        if not self.path(key).exists():
            raise self._missing(key)
        with open(self.path(key), "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != key:
                raise self._damaged(key)
            file.seek(0)
            yield file

    def has(self, key: str) -> bool:
        """Whether there is such a blob; whether its bytes still have its hash, reading it tells."""
        return self.path(key).exists()

    def keep_only(self, keys: Collection[str]) -> None:
        """Remove all other blobs."""
        for path in self.root.glob("*.blob"):
            if path.stem not in keys:
                path.unlink()

    def num_bytes(self) -> int:
        """Return the bytes of all blobs together."""
        return sum(path.stat().st_size for path in self.root.glob("*.blob"))

    def remove(self, key: str) -> None:
        """Remove a blob, if it is there."""
        self.path(key).unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        """Read a blob.

        Raises
        ------
        Mistake
            There is no such blob, or its bytes no longer have its hash.
        """
        try:
            data = self.path(key).read_bytes() if _SHA256.fullmatch(key) else None
        except FileNotFoundError:
            data = None
        if data is None:
            raise self._missing(key)
        if sha256(data) != key:
            raise self._damaged(key)
        return data

    def _missing(self, key: str) -> Mistake:
        return Mistake(f"{self.root}: there is no blob {key[:12]}; {self._remedy}")

    def _damaged(self, key: str) -> Mistake:
        return Mistake(f"{self.path(key)}: the bytes are damaged; {self._remedy}")

    def path(self, key: str) -> Path:
        """The file of a blob, whether it is there or not."""
        return self.root / f"{key}.blob"
