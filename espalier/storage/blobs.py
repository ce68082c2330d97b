"""Content-addressed blobs: the name of a blob is the SHA-256 of its bytes."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from espalier.errors import EspalierError, InputError
from espalier.storage.atomic import replacing, sync_directory, write_bytes

_SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


class BlobStore:
    """Directory of blobs, each in a file named ``<sha256>.blob``.

    It is created when the first blob is stored. ``remedy`` is the advice that is appended to the
    error for a damaged or missing blob.
    """

    def __init__(
        self, root: Path, mode: int = 0o644, remedy: str = "send the round's first message again"
    ) -> None:
        self.root = root
        self._mode = mode
        self._remedy = remedy

    def put(self, data: bytes) -> str:
        """Store a blob and return its hash; an intact copy that already exists is not rewritten."""
        key = sha256(data)
        # Hashing an existing copy also repairs a damaged one.
        if not self.is_whole(key):
            write_bytes(self.path(key), data, self._mode)
        return key

    def is_whole(self, key: str) -> bool:
        """Return True if the blob exists and its bytes have its hash."""
        try:
            with open(self.path(key), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == key
        except OSError:
            return False

    def put_pieces(self, pieces: Iterable[bytes | memoryview]) -> str:
        """Store a blob piece by piece, so that it need not fit in memory, and return its hash."""
        digest = hashlib.sha256()
        # The final name is the hash, which is known only after the last piece.
        unfinished = self.root / "unfinished"
        with replacing(unfinished, self._mode) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        unfinished.replace(self.path(digest.hexdigest()))
        sync_directory(self.root)
        return digest.hexdigest()

    @contextmanager
    def opened(self, key: str) -> Iterator[BinaryIO]:
        """Open a blob, or raise InputError if it is missing or does not have its hash."""
        if not self.has(key):
            raise self._missing(key)
        with open(self.path(key), "rb") as file:
            # Verified before it is used; it may be larger than memory.
            if hashlib.file_digest(file, "sha256").hexdigest() != key:
                raise self._damaged(key)
            file.seek(0)
            yield file

    def has(self, key: str) -> bool:
        """Return True if the blob exists; its bytes are not verified."""
        return self.path(key).exists()

    def keep_only(self, keys: Collection[str]) -> None:
        """Delete all blobs except ``keys``."""
        for path in self.root.glob("*.blob"):
            if path.stem not in keys:
                path.unlink()

    def num_bytes(self) -> int:
        """Return the total size of all blobs in bytes."""
        return sum(path.stat().st_size for path in self.root.glob("*.blob"))

    def remove(self, key: str) -> None:
        """Delete a blob if it exists."""
        self.path(key).unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        """Return the bytes of a blob.

        Raises InputError if ``key`` is not a SHA-256, or if the blob is missing or damaged.
        """
        try:
            # Keys may come from a message: nothing but a hash becomes part of a path.
            data = self.path(key).read_bytes() if _SHA256.fullmatch(key) else None
        except FileNotFoundError:
            data = None
        if data is None:
            raise self._missing(key)
        if sha256(data) != key:
            raise self._damaged(key)
        return data

    def _missing(self, key: str) -> EspalierError:
        return InputError(f"{self.root}: blob {key[:12]} is missing; {self._remedy}")

    def _damaged(self, key: str) -> EspalierError:
        return InputError(f"{self.path(key)}: is damaged; {self._remedy}")

    def path(self, key: str) -> Path:
        """Return the path of a blob, which need not exist."""
        return self.root / f"{key}.blob"
