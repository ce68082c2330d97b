"""Blobs by hash: the name of a blob is the SHA-256 of its bytes."""

import hashlib
import re
from pathlib import Path

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_bytes

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
            raise Mistake(f"{self.root}: there is no blob {key[:12]}; send the round's first message again") from None
        if sha256(data) != key:
            raise Mistake(f"{self._path(key)}: the bytes are damaged; remove the file and send the message again")
        return data

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.blob"
