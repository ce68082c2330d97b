"""Append-only log of JSON lines in which every entry has the hash of the one before it.

The egress log is such a log. Every entry has one canonical form (sorted keys, no blanks, ASCII) and
these keys: ``number``, from 1; ``before``, the ``sha256`` of the entry before it; and ``sha256``,
the hash of all other keys of the entry. ``before`` of the first entry is the hash of the log's
origin: its run and site.

Covers: an entry that was changed, removed, inserted or moved is found when the whole log is
verified (``chain_check``). Processes that share a log append in turn, under a lock of the file.
Entries are on the disk (``fsync``) when ``append`` returns. If a process ends during a write, its
incomplete line stays, and the next entry records it in ``unchained``: how many bytes before it do
not belong to the chain, and their hash.
Does not cover: entries that were cut off at the end, if nobody noted the last hash before. A person
with the right to write the file can rebuild the chain, from the beginning or from any entry to the
end, since no key is needed. Such a person can also truncate the last entries to incomplete lines
before the next entry is appended. Noting the last hash elsewhere protects against all of these.
"""

import errno
import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from espalier.environment.bounded_json import read_json
from espalier.errors import InputError
from espalier.storage.atomic import canonical, digest, sync_directory

NUMBER = "number"
BEFORE = "before"
OWN = "sha256"
UNCHAINED = "unchained"
CHAINED = {NUMBER, BEFORE, OWN}
"""Keys that every entry of a chain has."""
BEGINNING = b'{"'
"""First bytes of every entry."""
ORIGIN = ("lineage", "site")
"""Keys of an entry that identify the log: the run and the site."""
MIN_READ = 65_536
"""Number of bytes that are read from the end of a log at first."""


def _own_hash(entry: Mapping[str, Any]) -> str:
    return digest({key: value for key, value in entry.items() if key != OWN})


def _read_entry(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is not a JSON object."""
    try:
        entry = read_json(line)
        # NaN and infinite numbers are not JSON; Python's parser accepts them.
        canonical(entry)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _whole_entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; None if the line is not an unchanged entry of a chain."""
    entry = _read_entry(line)
    # Only the canonical form counts, so that no second spelling has the same hash.
    if entry is None or not entry.keys() >= CHAINED or canonical(entry) != line:
        return None
    return entry if type(entry[NUMBER]) is int and entry[OWN] == _own_hash(entry) else None


class _End(NamedTuple):
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
    """Writer of a hash chain, which creates a log with owner-only permissions.

    Every entry contains the ``origin``, its run and site, and the first one is bound to it.
    """

    def __init__(self, path: Path, origin: Mapping[str, str]) -> None:
        self.path = path
        self._origin = dict(origin)

    def append(self, entry: Mapping[str, Any]) -> str:
        """Append one entry and return its hash.

        Only the end of the log is read, so the time does not grow with its length. OSError has the
        path of the log; nothing of the entry is then in it.
        """
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # The lock covers reading the end and appending to it.
                fcntl.flock(handle, fcntl.LOCK_EX)
                return self._append(handle, entry)
            finally:
                os.close(handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _append(self, handle: int, entry: Mapping[str, Any]) -> str:
        size = os.fstat(handle).st_size
        end = self._end(handle, size)
        # Keys of the chain come last: an entry cannot overwrite them.
        record = {**entry, **self._origin, NUMBER: end.number + 1, BEFORE: end.head}
        # End an incomplete line first, so that the new entry begins on a line of its own.
        finish = b"\n" if end.open_end else b""
        # The chain accounts for every byte of the file.
        if end.stray:
            stray = end.stray + finish
            record[UNCHAINED] = {"bytes": len(stray), "sha256": hashlib.sha256(stray).hexdigest()}
        # The hash covers everything but itself.
        record[OWN] = _own_hash(record)
        data = finish + canonical(record) + b"\n"
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # On the disk before the reply leaves.
            os.fsync(handle)
            # The name of a new file must survive a crash too.
            if size == 0:
                sync_directory(self.path.parent)
        except OSError:
            # A full disk may leave a part of the entry; remove it.
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
        return str(record[OWN])

    def _end(self, handle: int, size: int) -> _End:
        """Find the last intact entry by reading backwards; it may lack its line end."""
        # From the end, in growing stretches.
        num_bytes = MIN_READ
        while True:
            start = max(0, size - num_bytes)
            data = os.pread(handle, size - start, start)
            open_end = size > 0 and not data.endswith(b"\n")
            stop = len(data)
            while stop > 0:
                # Beginning of the last line before ``stop``.
                line_start = data.rfind(b"\n", 0, stop - 1) + 1
                if line_start == 0 and start > 0:
                    # The beginning of this line was not read; read more below.
                    break
                if (
                    last_entry := _whole_entry(data[line_start:stop].removesuffix(b"\n"))
                ) is not None:
                    return _End(last_entry[OWN], last_entry[NUMBER], data[stop:], open_end)
                stop = line_start
            if start == 0:
                return _End(digest(self._origin), 0, data, open_end)
            # No intact entry in this stretch (it may be a long damaged one); read a longer one.
            num_bytes *= 8


@dataclass
class Checked:
    """Result of the verification of a log."""

    origin: dict[str, str] | None = None
    """Run and site of the log; None if no entry is intact."""
    head: str = ""
    """Hash of the last verified entry; empty if there is none."""
    entries: int = 0
    """Number of verified entries."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of entries per value of ``entry``: replies, and steps of their approval."""
    num_bytes: int = 0
    """Total size of all replies in bytes."""
    first: str = ""
    """Time of the first entry."""
    last: str = ""
    """Time of the last entry."""
    notes: list[str] = field(default_factory=list)
    """Remarks on incomplete lines.

    A process that ends during a write leaves such a line. A person who truncates an entry leaves
    one too.
    """
    fault: str = ""
    """First broken line and the reason; empty if the log is intact."""
    seen: dict[str, int] = field(default_factory=dict)
    """Entry numbers of the ``wanted`` hashes that were found, by hash."""


@dataclass
class _Torn:
    """Incomplete lines after the last verified entry.

    There are several if further processes ended during a write after an incomplete line.
    """

    first: int
    """Number of the first of these lines, from 1."""
    data: bytearray = field(default_factory=bytearray)

    def note(self, mention: str) -> str:
        """Return the remark on these lines."""
        last = self.first + len(self.data.splitlines()) - 1
        lines = f"line {last}: is" if self.first == last else f"lines {self.first} to {last}: are"
        reason = "a process that ends while it writes leaves such a line, and its reply is not sent"
        return (
            f"{lines} incomplete: {reason}; the last entry can also be damaged on purpose, which"
            f" shows against a hash that was noted before; {mention}"
        )


def chain_check(
    path: Path,
    wanted: Collection[str] = (),
    on_entry: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Checked:
    """Verify a log up to its end or its first fault, with one entry in memory at a time.

    ``wanted`` are hashes of entries; ``Checked.seen`` has those that were found. ``on_entry`` gets
    each verified entry. Raises InputError if the file cannot be read.
    """
    checked = Checked()
    torn = _Torn(1)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # The last entry may lack its line end; it counts as intact without one.
                if (entry := _whole_entry(line.removesuffix(b"\n"))) is not None:
                    checked.fault = _chain_fault(checked, torn, number, entry)
                    if not checked.fault:
                        _count(checked, torn, entry, wanted)
                        on_entry(entry)
                        torn = _Torn(number + 1)
                elif reason := _line_fault(line):
                    checked.fault = f"line {number}: {reason}"
                else:
                    torn.data += line
                if checked.fault:
                    return checked
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    # A complete line that no entry accounts for.
    if torn.data.endswith(b"\n"):
        checked.fault = f"line {torn.first}: is not an entry of the chain"
    elif torn.data:
        checked.notes.append(torn.note("the next entry will mention it"))
    return checked


def _line_fault(line: bytes) -> str:
    """Return why a line that is no intact entry was not left by a crash; empty if it may be."""
    entry = _read_entry(line) if line.endswith(b"\n") else None
    if entry is not None and entry.keys() >= CHAINED:
        if entry[OWN] == _own_hash(entry):
            return "was written again in another form"
        return "does not match its own hash: it was changed"
    text = line.removesuffix(b"\n")
    # A process that ends during a write leaves the beginning of a JSON object in ASCII.
    if (
        entry is None
        and BEGINNING.startswith(text[: len(BEGINNING)])
        and text.isascii()
        and text.decode("ascii").isprintable()
    ):
        return ""
    return "is neither an entry of the chain nor the beginning of one"


def _chain_fault(checked: Checked, torn: _Torn, number: int, entry: dict[str, Any]) -> str:
    """Return why an intact entry does not continue the chain; empty if it does."""
    recorded = entry.get(UNCHAINED)
    if torn.data and recorded is None:
        return (
            f"line {torn.first}: is not an entry of the chain, and the next entry does not"
            " mention it"
        )
    # The record must fit the bytes exactly.
    if recorded is not None and recorded != {
        "bytes": len(torn.data),
        "sha256": hashlib.sha256(torn.data).hexdigest(),
    }:
        return (
            f"line {torn.first}: the lines before entry {entry[NUMBER]} are not those that the"
            " entry recorded"
        )
    origin = {key: str(entry.get(key)) for key in ORIGIN}
    if checked.origin is not None and origin != checked.origin:
        return (
            f"line {number}: belongs to another run or site: {origin['lineage']} at"
            f" {origin['site']}"
        )
    # Numbers without a gap: removed entries are noticed.
    expected = checked.entries + 1
    entry_number = entry[NUMBER]
    if entry_number > expected:
        missing = (
            f"entry {expected} is"
            if entry_number == expected + 1
            else f"entries {expected} to {entry_number - 1} are"
        )
        return f"line {number}: is entry {entry_number}, and {missing} missing before it"
    if entry_number < expected:
        return (
            f"line {number}: is entry {entry_number}, but follows entry {checked.entries}: it was"
            " moved or inserted"
        )
    # The first entry is bound to the run and site instead of to an earlier entry.
    if entry[BEFORE] != (checked.head or digest(origin)):
        return (
            f"line {number}: does not contain the hash of the lines before it: one of them was"
            " replaced"
        )
    return ""


def _count(checked: Checked, torn: _Torn, entry: dict[str, Any], hashes: Collection[str]) -> None:
    """Count an entry that continues the chain."""
    if torn.data:
        checked.notes.append(torn.note(f"entry {entry[NUMBER]} mentions it"))
    checked.origin = {key: str(entry.get(key)) for key in ORIGIN}
    checked.head = entry[OWN]
    checked.entries = entry[NUMBER]
    kind = str(entry.get("entry", "reply"))
    checked.kinds[kind] += 1
    if kind == "reply" and type(size := entry.get("bytes")) is int:
        checked.num_bytes += size
    checked.last = str(entry.get("time", ""))
    checked.first = checked.first or checked.last
    if entry[OWN] in hashes:
        checked.seen[entry[OWN]] = entry[NUMBER]
