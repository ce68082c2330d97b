"""Files that survive a crash: replaced as a whole, appended by whole lines, or with a checksum.

A file is written under a temporary name, synced with ``fsync`` and renamed; then its directory is
synced. So a reader sees the old file or the complete new one. Sealed documents have a version and
the SHA-256 of their content.
Covers: bytes that changed on the disk, a truncated file, a value that was edited by hand.
Does not cover: a person who writes a new checksum on purpose.
"""

import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError

SEAL = "sha256"
"""Key of a document's checksum."""


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    The temporary file is in the same directory as ``path``, which is created if it is missing. The
    new file has the permissions ``mode``. Raises InputError, with ``path`` unchanged, if the file
    system refuses, for lack of space or permission.
    """
    try:
        # The same directory, because a rename is atomic only within one file system.
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "choose another directory"
        raise InputError(f"cannot write {path}: {error.strerror}; {remedy}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            # ``fsync`` before the rename: otherwise a power failure may leave an empty file with
            # the name.
            file.flush()
            os.fsync(file.fileno())
        # ``mkstemp`` creates the file with owner-only permissions.
        os.chmod(name, mode)
        os.replace(name, path)
        # The rename survives a power failure only after the directory is synced.
        sync_directory(path.parent)
    # Also after Ctrl-C no temporary file is left.
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(name)
        if not isinstance(error, OSError):
            raise
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; the file is unchanged"
        ) from error


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a whole file atomically; see ``replacing`` for errors."""
    with replacing(path, mode) as file:
        file.write(data)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write a JSON file atomically, with keys in the given order.

    InputError names the key of a number that is NaN or infinite, which JSON cannot represent. Also
    in the cases of ``replacing``.
    """
    if (key := next(not_finite_keys(value), None)) is not None:
        raise InputError(f"cannot write {path}: {key} is NaN or infinite; the file is unchanged")
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), mode)


def not_finite_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys (``metrics.0.value``) of all NaN or infinite numbers in a JSON value."""
    if isinstance(value, float) and not math.isfinite(value):
        yield key or "the value"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from not_finite_keys(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from not_finite_keys(inner, f"{key}.{index}".lstrip("."))


def finite_values(value: Any) -> Any:
    """Return a JSON value in which null replaces every NaN or infinite number.

    Metrics and summaries use it. There a number may be missing, because the text next to it gives
    the reason.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_values(inner) for name, inner in value.items()}
    return [finite_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that new and renamed files in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        # Serialised before the file is opened, so an invalid entry leaves it unchanged.
        line = json.dumps(entry, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            # A machine that went down may leave an incomplete last line.
            is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if is_torn else b"") + line.encode()
            # One system call, so that lines of several processes do not mix.
            if os.write(handle, data) != len(data):
                # Undo a partial write of a full disk.
                os.ftruncate(handle, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)


def canonical(value: Any) -> bytes:
    """Return the canonical form of a JSON value, in which it is hashed.

    Raises ValueError if a number is NaN or infinite.
    """
    # Sorted and without blanks: equal values have equal hashes.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of the canonical form of a value."""
    return hashlib.sha256(canonical(value)).hexdigest()


class Damaged(EspalierError):
    """Error for a document whose content no longer has its checksum."""


def sealed(document: dict[str, Any]) -> bytes:
    """Return the bytes of a document with its checksum, with keys in sorted order."""
    # The checksum covers the values as they will be read, for instance tuples as lists.
    as_read = json.loads(json.dumps(document, allow_nan=False))
    document = {**as_read, SEAL: digest(as_read)}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def read_sealed(path: Path, version: int) -> dict[str, Any]:
    """Read a document, verify it and return it without its checksum.

    Raises Damaged if the file is not a JSON document with its checksum, and InputError if it cannot
    be read or has another version.
    """
    try:
        document = read_json(path.read_bytes().decode())
        seal = document.pop(SEAL, None) if isinstance(document, dict) else None
        # A document that is not an object has no checksum and fails below.
        is_unchanged = digest(document) == seal
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path}: is damaged: it is not a JSON document") from None
    if not isinstance(document, dict) or not document:
        raise Damaged(f"{path}: is damaged: it contains no document")
    if not is_unchanged:
        raise Damaged(f"{path}: is damaged: its checksum does not match, so it was changed")
    # The version is checked after the checksum: a damaged one would be misleading.
    if (document_version := document.get("version")) != version:
        raise InputError(
            f"{path}: has version {document_version}, but this program reads version {version};"
            " resume with the release that wrote it"
        )
    return document
