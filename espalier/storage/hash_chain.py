"""Append-only log of JSON lines in which every entry has the hash of the one before it.

The egress log is such a log. Every entry has one canonical form (sorted keys, no blanks, ASCII) and
these keys: ``number``, from 1; ``before``, the ``sha256`` of the entry before it; and ``sha256``,
the hash of all other keys of the entry. ``before`` of the first entry is the hash of the log's
origin, for instance its run and site.

Covers: an entry that was changed, removed, inserted or moved is found when the whole log is
verified (``chain_check``). Processes that share a log append in turn, under a lock of the file.
Entries are on the disk (``fsync``) when ``append`` returns. If a process ends during a write, its
incomplete line stays, and the next entry records it in ``unchained``: how many bytes before it do
not belong to the chain, and their hash. Entries by a release whose logs had no chain are recorded
in the same way.
Does not cover: entries that were cut off at the end, if nobody noted the last hash before. A person
with the right to write the file can rebuild the chain, from the beginning or from any entry to the
end, since no key is needed. Such a person can also truncate the last entries to incomplete lines
before the next entry is appended. Noting the last hash elsewhere protects against all of these.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.storage.atomic import sync_directory

NUMBER = "number"
BEFORE = "before"
OWN = "sha256"
UNCHAINED = "unchained"
CHAINED = {NUMBER, BEFORE, OWN}
"""Keys that every entry of a chain has."""
MIN_READ = 65_536
"""Number of bytes that are read from the end of a log at first."""


def canonical(value: Any) -> bytes:
    """Return the canonical JSON form of a value, in which it is written and hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of the canonical form of a value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def read_entry(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is not a JSON object."""
    try:
        entry = read_json(line, parse_constant=_no_number)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def is_whole(entry: Mapping[str, Any] | None, line: bytes) -> bool:
    """Return True if a line is an unchanged entry, regardless of the lines before it."""
    if entry is None or not entry.keys() >= CHAINED or canonical(entry) != line:
        return False
    return type(entry[NUMBER]) is int and entry[OWN] == own_hash(entry)


def own_hash(entry: Mapping[str, Any]) -> str:
    """Return the hash of an entry, which covers all keys except ``sha256``."""
    return digest({key: value for key, value in entry.items() if key != OWN})


@dataclass(frozen=True)
class _End:
    """End of a log."""

    head: str
    """Hash of the last intact entry, or of the origin if there is none."""
    number: int
    """Number of the last intact entry; 0 if there is none."""
    stray: bytes
    """Bytes after the last intact entry."""
    open_end: bool
    """True if the last line has no line end."""


class HashChain:
    """Writer of a hash chain.

    Parameters
    ----------
    path
        The log. It is created with the first entry.
    origin
        What the log belongs to, for instance a run and a site. Every entry contains it, and the
        first one is bound to it.
    mode
        Permissions of a new log.
    """

    def __init__(self, path: Path, origin: Mapping[str, str], mode: int = 0o600) -> None:
        self.path = path
        self._origin = dict(origin)
        self._mode = mode

    def append(self, entry: Mapping[str, Any]) -> str:
        """Append one entry and return its hash.

        Only the end of the log is read, so the time does not grow with its length.

        Raises
        ------
        OSError
            If the entry could not be written; the error has the path. Nothing of the entry is then
            in the log.
        """
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._mode)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                return self._append(handle, entry)
            finally:
                os.close(handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _append(self, handle: int, entry: Mapping[str, Any]) -> str:
        size = os.fstat(handle).st_size
        end = self._end(handle, size)
        whole = {**entry, **self._origin, NUMBER: end.number + 1, BEFORE: end.head}
        # End an incomplete line first, so that the new entry begins on a line of its own.
        finish = b"\n" if end.open_end else b""
        if end.stray:
            stray = end.stray + finish
            whole[UNCHAINED] = {"bytes": len(stray), "sha256": hashlib.sha256(stray).hexdigest()}
        whole[OWN] = own_hash(whole)
        data = finish + canonical(whole) + b"\n"
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
            if size == 0:
                sync_directory(self.path.parent)
        except OSError:
            # A full disk may leave a part of the entry; remove it.
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
        return str(whole[OWN])

    def _end(self, handle: int, size: int) -> _End:
        """Find the last intact entry by reading backwards.

        An entry that lacks only its line end is intact.
        """
        wanted = MIN_READ
        while True:
            start = max(0, size - wanted)
            data = os.pread(handle, size - start, start)
            open_end = not data.endswith(b"\n")
            stop = len(data)
            while stop > 0:
                begin = data.rfind(b"\n", 0, stop - 1) + 1
                if begin == 0 and start > 0:
                    # The beginning of this line was not read; read more below.
                    break
                line = data[begin:stop].removesuffix(b"\n")
                if (found := read_entry(line)) is not None and is_whole(found, line):
                    return _End(found[OWN], found[NUMBER], data[stop:], open_end)
                stop = begin
            if start == 0:
                return _End(digest(self._origin), 0, data, open_end and size > 0)
            # No intact entry in this stretch (it may be a long damaged one); read a longer one.
            wanted *= 8
