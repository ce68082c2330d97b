"""Verification of a log that ``hash_chain`` wrote, up to its end or its first fault.

See ``hash_chain`` for the faults that are detected and those that are not. One line of the log is
in memory at a time.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.amounts import count
from espalier.errors import InputError
from espalier.storage.hash_chain import (
    BEFORE,
    CHAINED,
    NUMBER,
    OWN,
    UNCHAINED,
    digest,
    is_whole,
    own_hash,
    read_entry,
)

BEGINNING = b'{"'
"""First bytes of every entry."""
BOUND_TO = ("lineage", "site")
"""Keys of an entry that identify the log: the run and the site."""


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
    """Remarks on lines that do not belong to the chain but are not faults."""
    fault: str = ""
    """First broken line and the reason; empty if the log is intact."""
    unchained: int = 0
    """Number of entries by a release whose logs had no chain."""
    torn: int = 0
    """Number of incomplete lines.

    A process that ends during a write leaves such a line. A person who truncates an entry leaves
    one too.
    """
    seen: dict[str, int] = field(default_factory=dict)
    """Entry numbers of the ``wanted`` hashes that were found, by hash."""


@dataclass
class _Stray:
    """Lines after the last verified entry that do not belong to the chain."""

    first_line: int = 0
    """Number of the first such line, from 1; 0 if there is none."""
    num_bytes: int = 0
    """Total size of these lines in bytes, with their line ends."""
    older: int = 0
    """Number of entries among them that have no chain keys."""
    others: int = 0
    """Number of incomplete lines among them."""
    changed: str = ""
    """Description of the first line that was altered or is foreign; empty if there is none."""
    open_end: bool = False
    """True if the last of these lines has no line end."""
    hash: Any = field(default_factory=hashlib.sha256)
    """SHA-256 over these lines, as the next entry must state it."""

    def add(self, number: int, line: bytes, entry: dict[str, Any] | None) -> None:
        """Classify a line, which includes its line end, and count it."""
        self.first_line = self.first_line or number
        self.num_bytes += len(line)
        self.hash.update(line)
        self.open_end = not line.endswith(b"\n")
        if entry is not None and not self.open_end and entry.keys() >= CHAINED:
            same = entry[OWN] == own_hash(entry)
            why = (
                "was written again in another form"
                if same
                else "does not match its own hash: it was changed"
            )
            self.changed = self.changed or f"line {number}: {why}"
        elif entry is not None and not self.open_end:
            self.older += 1
        elif _may_be_torn(line):
            self.others += 1
        else:
            self.changed = (
                self.changed
                or f"line {number}: is neither an entry of the chain nor the beginning of one"
            )


def chain_check(path: Path, wanted: Collection[str] = ()) -> Checked:
    """Verify a log up to its end or its first fault.

    Parameters
    ----------
    path
        The log.
    wanted
        Hashes of entries to look for; ``Checked.seen`` has those that were found.

    Raises
    ------
    InputError
        If the file cannot be read.
    """
    checked = Checked()
    stray = _Stray()
    try:
        for number, line in _lines(path):
            entry = read_entry(line)
            # The last entry may lack its line end; it counts as intact without one.
            if not is_whole(entry, line.removesuffix(b"\n")):
                stray.add(number, line, entry)
                continue
            assert entry is not None
            checked.fault = _fault(checked, stray, number, entry)
            if checked.fault:
                return checked
            _take(checked, stray, number, entry, wanted)
            stray = _Stray()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    _end(checked, stray)
    return checked


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield from enumerate(file, start=1)


def _fault(checked: Checked, stray: _Stray, number: int, entry: dict[str, Any]) -> str:
    """Return why an intact entry does not continue the chain; empty if it does."""
    if stray.changed:
        return stray.changed
    # Entries without a chain may only precede the first entry of the chain.
    if stray.older and checked.entries:
        return f"line {stray.first_line}: is not an entry of the chain"
    recorded = entry.get(UNCHAINED)
    if stray.num_bytes and recorded is None:
        return (
            f"line {stray.first_line}: is not an entry of the chain, and the next entry does not"
            " mention it"
        )
    if recorded is not None and recorded != {
        "bytes": stray.num_bytes,
        "sha256": stray.hash.hexdigest(),
    }:
        return (
            f"line {stray.first_line or number}: the lines before entry {entry[NUMBER]} are not"
            " those that the entry recorded"
        )
    origin = {key: str(entry.get(key)) for key in BOUND_TO}
    if checked.origin is not None and origin != checked.origin:
        return (
            f"line {number}: belongs to another run or site: {origin['lineage']} at"
            f" {origin['site']}"
        )
    expected = checked.entries + 1
    found = entry[NUMBER]
    if found > expected:
        missing = (
            f"entry {expected} is"
            if found == expected + 1
            else f"entries {expected} to {found - 1} are"
        )
        return f"line {number}: is entry {found}, and {missing} missing before it"
    if found < expected:
        return (
            f"line {number}: is entry {found}, but follows entry {checked.entries}: it was moved"
            " or inserted"
        )
    # The first entry is bound to the run and site instead of to an earlier entry.
    if entry[BEFORE] != (checked.head or digest(origin)):
        return (
            f"line {number}: does not contain the hash of the lines before it: one of them was"
            " replaced"
        )
    return ""


def _take(
    checked: Checked, stray: _Stray, number: int, entry: dict[str, Any], wanted: Collection[str]
) -> None:
    if stray.older:
        older = (
            f"{count(stray.older, 'entry', 'entries')} of a release without a chain, unchanged"
            " since"
        )
        checked.notes.append(f"before entry {entry[NUMBER]}: {older}")
    checked.torn += stray.others
    if stray.others:
        checked.notes.append(
            _torn(number - stray.others, number - 1, f"entry {entry[NUMBER]} mentions it")
        )
    checked.origin = {key: str(entry.get(key)) for key in BOUND_TO}
    checked.unchained += stray.older
    checked.head = entry[OWN]
    checked.entries = entry[NUMBER]
    kind = str(entry.get("entry", "reply"))
    checked.kinds[kind] += 1
    if kind == "reply" and type(size := entry.get("bytes")) is int:
        checked.num_bytes += size
    checked.last = str(entry.get("time", ""))
    checked.first = checked.first or checked.last
    if entry[OWN] in wanted:
        checked.seen[entry[OWN]] = entry[NUMBER]


def _end(checked: Checked, stray: _Stray) -> None:
    """Judge the lines after the last entry.

    An incomplete line is noted, and a log without any chain is counted as ``unchained``. Anything
    else is a fault.
    """
    if not stray.num_bytes:
        return
    if stray.changed:
        checked.fault = stray.changed
    elif stray.open_end and not stray.older:
        checked.torn += stray.others
        checked.notes.append(
            _torn(
                stray.first_line,
                stray.first_line + stray.others - 1,
                "the next entry will mention it",
            )
        )
    elif stray.others == stray.open_end and not checked.entries:
        checked.unchained = stray.older
    else:
        checked.fault = f"line {stray.first_line}: is not an entry of the chain"


def _may_be_torn(line: bytes) -> bool:
    """Return True if a line looks like the beginning of an entry: of a JSON object in ASCII."""
    text = line.removesuffix(b"\n")
    return (
        BEGINNING.startswith(text[: len(BEGINNING)])
        and text.isascii()
        and text.decode("ascii").isprintable()
    )


def _torn(first: int, last: int, mention: str) -> str:
    """Return the note on incomplete lines.

    There are several if further processes ended during a write after an incomplete line.
    """
    lines = f"line {first}: is" if first == last else f"lines {first} to {last}: are"
    left = "a process that ends while it writes leaves such a line, and its reply is not sent"
    return (
        f"{lines} incomplete: {left}; the last entry can also be damaged on purpose, which shows"
        f" against a hash that was noted before; {mention}"
    )
