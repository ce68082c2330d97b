"""Exclusive lock of a directory; the error for a second process names the first one.

Covers: processes of one machine, also in containers that share the directory. The kernel releases a
lock when its process ends, however it ends, so that no lock is ever stale.
Does not cover: machines that share the directory over a network file system without locks between
machines (for instance NFS mounted with ``nolock`` or ``local_lock``). If the file system has no
locks at all, a warning says so.
"""

import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError, InputError

LOCK = "lock"
"""Name of the lock file.

It stays in the directory, and its text names the holder of the lock, if any.
"""
OWNER_ONLY_FILE = 0o600
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Error numbers of a file system without locks."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a directory for the duration of the block.

    InputError names the process that holds the lock, or says that the lock file cannot be written.
    """
    path = folder / LOCK
    with open(_opened(path, os.O_RDWR, 0o644), "r+") as file:
        try:
            # The kernel releases the lock with the last handle, even after a crash.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held(folder, _holder(path)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise InputError(f"{path}: cannot be locked: {error.strerror}") from None
            warnings.warn(
                f"{path}: this file system has no locks; a second process cannot be kept out",
                stacklevel=3,
            )
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        # For the error of another process; the lock itself is the kernel's.
        _write(file.fileno(), json.dumps(owner) + "\n")
        try:
            yield
        finally:
            _write(file.fileno(), "")


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait for the lock of a directory and hold it for the duration of the block.

    The modification time of the lock file becomes the time of this use. Raises InputError if it
    cannot be written.
    """
    with open(_opened(folder / LOCK, os.O_WRONLY, OWNER_ONLY_FILE), "w") as file:
        # Blocks until the other process has finished.
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(file.fileno())
        yield


def touch_lock(folder: Path) -> None:
    """Set the time of a directory's lock file without locking; create the file if it is missing."""
    with open(_opened(folder / LOCK, os.O_WRONLY, OWNER_ONLY_FILE), "w") as file:
        os.utime(file.fileno())


def require_free(folder: Path) -> None:
    """Raise InputError if ``locked`` would fail now; nothing is written."""
    path = folder / LOCK
    if not os.access(path if path.exists() else folder, os.W_OK):
        # A directory without a lock file is checked for writing.
        raise _cannot_be_opened(path, os.strerror(errno.EACCES))
    if holder := holder_of(folder):
        raise _held(folder, holder)


def holder_of(folder: Path) -> str:
    """Return a description of the process that holds the lock of a directory; empty if none does.

    Nothing is written. Raises InputError if the lock file exists and cannot be read.
    """
    path = folder / LOCK
    if not path.exists():
        return ""
    try:
        with open(path) as file:
            # Closing the file releases this lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return ""


def _opened(path: Path, access: int, mode: int) -> int:
    try:
        return os.open(path, access | os.O_CREAT, mode)
    except OSError as error:
        raise _cannot_be_opened(path, error.strerror) from None


def _cannot_be_opened(path: Path, reason: str | None) -> EspalierError:
    return InputError(
        f"{path}: cannot be opened: {reason}; give this user the right to write there"
    )


def _held(folder: Path, holder: str) -> EspalierError:
    return InputError(f"{folder}: {holder} is working there; wait until it has ended, or end it")


def _write(handle: int, text: str) -> None:
    """Write the label of the lock; on an error only warn, since the lock holds without it."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
    except OSError:
        warnings.warn("the lock of the run directory could not be labelled", stacklevel=3)


def _holder(path: Path) -> str:
    try:
        document = read_json(path.read_text())
        return f"process {document['pid']} on {document['host']} (since {document['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
