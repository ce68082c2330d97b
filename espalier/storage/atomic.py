"""Atomic file writes: a reader sees the old file or the complete new one, never a partial file.

A file is written under a temporary name, synced with ``fsync`` and renamed; then its directory is
synced.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from espalier.errors import InputError


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    The temporary file is in the same directory as ``path``, which is created if it is missing. The
    new file has the permissions ``mode``. InputError, with ``path`` unchanged, if the file system
    refuses, for lack of space or permission.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; choose another directory or free some space"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # ``mkstemp`` creates the file with owner-only permissions.
        os.chmod(name, mode)
        os.replace(name, path)
        # The rename survives a power failure only after the directory is synced.
        sync_directory(path.parent)
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
        for place, inner in enumerate(value):
            yield from not_finite_keys(inner, f"{key}.{place}".lstrip("."))


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
