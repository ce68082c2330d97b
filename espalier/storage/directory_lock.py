"""One process at a time works in a directory, and whoever comes second is told who it is.

Covers: processes of one machine, also in containers that share the directory. The kernel lets a lock go when its process ends,
however it ends, so that none is ever stale.
Does not cover: machines that share the directory over a network file system without locks between machines (NFS mounted with
``nolock`` or ``local_lock``, for instance). Where the file system has no locks at all, a warning says so.
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

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake

FILE = "lock"
"""It stays in the directory; who holds the lock, if anybody does, stands in it."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a directory.

    Raises
    ------
    Mistake
        Another process holds it, which is named; or the file of the lock cannot be written.
    """
    path = folder / FILE
    with open(_opened(path, os.O_CREAT), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held(path) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise Mistake(f"{path}: cannot be locked: {error.strerror}") from None
            warnings.warn(
                f"{path}: this file system has no locks; nothing keeps a second process away",
                stacklevel=3,
            )
        _write(file.fileno(), _oneself())
        try:
            yield
        finally:
            _write(file.fileno(), "")


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Hold the lock of a directory; a second process waits until the first is done or dead. The lock's time is that of use."""
    with open(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(file.fileno())
        yield


def require_free(folder: Path) -> None:
    """Raise Mistake as ``locked`` does if another process holds the lock now, or it cannot be had; nothing is written."""
    path = folder / FILE
    if not path.exists():
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _cannot_be_opened(path, os.strerror(errno.EACCES))
        return
    with open(_opened(path), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file lets it go
        except BlockingIOError:
            raise _held(path) from None
        except OSError:
            return  # ``locked`` has a word for it


def holder_of(folder: Path) -> str:
    """Return which process holds the lock of a directory now, in words; empty if none does. Nothing is written.

    Raises
    ------
    Mistake
        The file of the lock is there, and cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return ""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise Mistake(f"{path}: cannot be read: {error.strerror}") from None
    return ""


def _opened(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | flags, 0o644)
    except OSError as error:
        raise _cannot_be_opened(path, error.strerror) from None


def _cannot_be_opened(path: Path, why: str | None) -> Mistake:
    return Mistake(f"{path}: cannot be opened: {why}; give this user the right to write there")


def _held(path: Path) -> Mistake:
    return Mistake(
        f"{path.parent}: {_holder(path)} is at work there; wait until it has ended, or end it"
    )


def _oneself() -> str:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"


def _write(handle: int, text: str) -> None:
    """A full disk is no reason to end: the lock holds without its words."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
    except OSError:
        warnings.warn("the lock of the run directory could not be labelled", stacklevel=3)


def _holder(path: Path) -> str:
    try:
        found = read_json(path.read_text())
        return f"process {found['pid']} on {found['host']} (since {found['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
