"""An append-only log in which every entry holds the hash of the one before it, a JSON object a line: the egress log.

An entry is written in one form (sorted keys, no blanks, ASCII) and has a ``number`` from 1 on, ``before``: the ``sha256`` of
the entry before it, and ``sha256``: the hash of all the rest of it. ``before`` of the first is the hash of what the log is of.

Covers: an entry that was changed, removed, inserted or moved is found, by whoever reads the whole log (``chain_check``).
Processes that share a log append in turn, under a lock of the file. Entries are on the disk (fsync) when ``append`` returns.
What a process left that ended while it wrote stays where it is, and the next entry says so (``unchained``: how many bytes
before it are no part of the chain, and their hash); so it does of the entries of a release whose log had no chain.
Does not cover: entries cut off at the end, which nobody misses who did not note the last hash before; nor somebody with the
right to write the file who makes the chain anew, whole or from some entry to its end, as no key is needed for that; nor entries
at the end that were made torn lines before the next one was appended. Against all helps the last hash, noted elsewhere.
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

from espalier.settings.bounded_json import read_json
from espalier.storage.atomic import sync_directory

NUMBER = "number"
BEFORE = "before"
OWN = "sha256"
UNCHAINED = "unchained"
CHAINED = {NUMBER, BEFORE, OWN}
"""Keys that every entry has."""
LEAST_READ = 65_536
"""Bytes that are read from the end of a log, to begin with."""


def canonical(value: Any) -> bytes:
    """The one form in which a value is written and hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """Hexadecimal SHA-256 of a value's one form."""
    return hashlib.sha256(canonical(value)).hexdigest()


def read_entry(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none."""
    try:
        entry = read_json(line, parse_constant=_no_number)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def is_whole(entry: Mapping[str, Any] | None, line: bytes) -> bool:
    """Whether a line is an entry as it was written, whatever stands before it."""
    if entry is None or not entry.keys() >= CHAINED or canonical(entry) != line:
        return False
    return type(entry[NUMBER]) is int and entry[OWN] == own_hash(entry)


def own_hash(entry: Mapping[str, Any]) -> str:
    """The hash of an entry, of all but itself."""
    return digest({key: value for key, value in entry.items() if key != OWN})


@dataclass(frozen=True)
class _End:
    """Where a log ends."""

    head: str
    """Hash of the last whole entry."""
    number: int
    stray: bytes
    """What stands behind it."""
    open_end: bool
    """The last line has no end."""


class HashChain:
    """Appends entries to a chain.

    Parameters
    ----------
    origin : what the log is of, for instance a run and a site; it stands in every entry, and the first one is bound to it
    """

    def __init__(self, path: Path, origin: Mapping[str, str], mode: int = 0o600) -> None:
        self.path = path
        self._origin = dict(origin)
        self._mode = mode

    def append(self, entry: Mapping[str, Any]) -> str:
        """Append one entry, and return its hash; OSError, with the path, if it could not be, and then nothing of it is there.

        Of the log only the end is read, however long it is.
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
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
        return str(whole[OWN])

    def _end(self, handle: int, size: int) -> _End:
        """Find the last whole entry, from the end backwards; one that lacks no more than its line's end is whole."""
        wanted = LEAST_READ
        while True:
            start = max(0, size - wanted)
            data = os.pread(handle, size - start, start)
            open_end = not data.endswith(b"\n")
            stop = len(data)
            while stop > 0:
                begin = data.rfind(b"\n", 0, stop - 1) + 1
                if begin == 0 and start > 0:
                    break  # of this line the beginning was not read
                line = data[begin:stop].removesuffix(b"\n")
                if (found := read_entry(line)) is not None and is_whole(found, line):
                    return _End(found[OWN], found[NUMBER], data[stop:], open_end)
                stop = begin
            if start == 0:
                return _End(digest(self._origin), 0, data, open_end and size > 0)
            wanted *= 8
