"""JSON files: append-only lines, and documents with a version and the SHA-256 of their content.

Covers: bytes that changed on the disk, a truncated file, a value that was edited by hand.
Does not cover: a person who writes a new checksum on purpose.
"""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError


class JsonLines:
    """Append-only file of JSON objects.

    A line is written whole, by one system call, and never joined to an incomplete line before it.
    Missing parent directories are created with the first entry.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: dict[str, Any]) -> None:
        """Append one entry.

        If it cannot be written whole, nothing of it is in the file, and the OSError has the path.
        """
        line = json.dumps(entry, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            # A machine that went down may leave an incomplete last line.
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line.encode()
            # One system call, so that lines of several processes do not mix.
            if os.write(handle, data) != len(data):
                os.ftruncate(handle, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)


SEAL = "sha256"
"""Key of the checksum."""


class Damaged(EspalierError):
    """Error for a document whose content no longer has its checksum."""


def sealed(document: dict[str, Any]) -> bytes:
    """Return the bytes of a document with its checksum, with keys in sorted order."""
    # The checksum covers the values as they will be read, for instance tuples as lists.
    as_read = json.loads(json.dumps(document, allow_nan=False))
    return (
        json.dumps({**as_read, SEAL: _digest(as_read)}, indent=2, sort_keys=True) + "\n"
    ).encode()


def read_sealed(path: Path, version: int) -> dict[str, Any]:
    """Read a document, verify it and return it without its checksum.

    Raises Damaged if the file is not a JSON document with its checksum, and InputError if it cannot
    be read or has another version.
    """
    try:
        document = read_json(path.read_bytes().decode())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path}: is damaged: it is not a JSON document") from None
    if not isinstance(document, dict) or not document:
        raise Damaged(f"{path}: is damaged: it contains no document")
    if document.pop(SEAL, None) != _digest(document):
        raise Damaged(f"{path}: is damaged: its checksum does not match, so it was changed")
    if (found := document.get("version")) != version:
        raise InputError(
            f"{path}: has version {found}, but this program reads version {version}; resume with"
            " the release that wrote it"
        )
    return document


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
