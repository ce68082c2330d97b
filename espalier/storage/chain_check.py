"""Go through a log of ``hash_chain`` from its beginning, and say whether it is whole, or which line is the first that is not.

Covers and does not cover: see ``hash_chain``. Of the log a line at a time is in memory.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.amounts import count
from espalier.settings.mistakes import Mistake
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
"""Of every entry."""
BOUND_TO = ("lineage", "site")
"""What the egress log of a site in a run is of."""


@dataclass
class Checked:
    """What was found in a log."""

    origin: dict[str, str] | None = None
    """Run and site; None where no entry is whole."""
    head: str = ""
    """Hash of the last entry of the chain, as far as that is whole."""
    entries: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """How many entries of each ``entry``: replies, and what became of those that were held."""
    num_bytes: int = 0
    """Of all replies."""
    first: str = ""
    last: str = ""
    """Times of the first and the last entry."""
    notes: list[str] = field(default_factory=list)
    """What is no part of the chain, and was told by it."""
    fault: str = ""
    """The first broken line, and why; empty where the log is whole."""
    unchained: int = 0
    """Entries of a release whose log had no chain."""
    torn: int = 0
    """Lines that are the beginning of an entry: of a process that ended while it wrote, or made of an entry by somebody."""
    seen: dict[str, int] = field(default_factory=dict)
    """Of the hashes that were looked for, the numbers of their entries."""


@dataclass
class _Stray:
    """Lines that are no part of the chain, since its last entry."""

    first_line: int = 0
    num_bytes: int = 0
    older: int = 0
    """Entries without a chain among them."""
    others: int = 0
    changed: str = ""
    """An entry of the chain that is not as it was written, and why."""
    open_end: bool = False
    """The last of them has no end."""
    hash: Any = field(default_factory=hashlib.sha256)

    def add(self, number: int, line: bytes, entry: dict[str, Any] | None) -> None:
        """Note a line, with its end."""
        self.first_line = self.first_line or number
        self.num_bytes += len(line)
        self.hash.update(line)
        self.open_end = not line.endswith(b"\n")
        if entry is not None and not self.open_end and entry.keys() >= CHAINED:
            same = entry[OWN] == own_hash(entry)
            why = (
                "is not written as it was"
                if same
                else "does not have its own hash: something in it was changed"
            )
            self.changed = self.changed or f"line {number}: {why}"
        elif entry is not None and not self.open_end:
            self.older += 1
        elif _may_be_torn(line):
            self.others += 1
        else:
            self.changed = (
                self.changed or f"line {number}: is no entry of the chain, nor the beginning of one"
            )


def chain_check(path: Path, wanted: Collection[str] = ()) -> Checked:
    """Read a log to its end, or to its first fault; ``wanted`` are hashes of entries that shall be in it.

    Raises
    ------
    Mistake
        It cannot be read.
    """
    checked = Checked()
    stray = _Stray()
    try:
        for number, line in _lines(path):
            entry = read_entry(line)
            if not is_whole(entry, line.removesuffix(b"\n")):  # an entry may lack its line's end
                stray.add(number, line, entry)
                continue
            assert entry is not None
            checked.fault = _fault(checked, stray, number, entry)
            if checked.fault:
                return checked
            _take(checked, stray, number, entry, wanted)
            stray = _Stray()
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror}") from None
    _end(checked, stray)
    return checked


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield from enumerate(file, start=1)


def _fault(checked: Checked, stray: _Stray, number: int, entry: dict[str, Any]) -> str:
    """Why an entry, whole by itself, does not follow what stands before it; empty if it does."""
    if stray.changed:
        return stray.changed
    if stray.older and checked.entries:
        return f"line {stray.first_line}: is no entry of the chain"
    told = entry.get(UNCHAINED)
    if stray.num_bytes and told is None:
        return (
            f"line {stray.first_line}: is no entry of the chain, and the entry behind it does not"
            " tell of it"
        )
    if told is not None and told != {"bytes": stray.num_bytes, "sha256": stray.hash.hexdigest()}:
        return (
            f"line {stray.first_line or number}: what stands before entry {entry[NUMBER]} is not"
            " what that found there"
        )
    origin = {key: str(entry.get(key)) for key in BOUND_TO}
    if checked.origin is not None and origin != checked.origin:
        return f"line {number}: is of another run or site: {origin['lineage']} at {origin['site']}"
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
            f"line {number}: is entry {found}, and stands behind entry {checked.entries}: it was"
            " moved or inserted"
        )
    if entry[BEFORE] != (checked.head or digest(origin)):
        return (
            f"line {number}: does not hold the hash of what stands before it: one of the two was"
            " exchanged"
        )
    return ""


def _take(
    checked: Checked, stray: _Stray, number: int, entry: dict[str, Any], wanted: Collection[str]
) -> None:
    if stray.older:
        told = (
            f"{count(stray.older, 'entry', 'entries')} of a release without a chain, unchanged"
            " since"
        )
        checked.notes.append(f"before entry {entry[NUMBER]} stand {told}")
    checked.torn += stray.others
    if stray.others:
        checked.notes.append(
            _torn(number - stray.others, number - 1, f"entry {entry[NUMBER]} tells of it")
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
    """What stands behind the last entry."""
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
                "the next entry will tell of it",
            )
        )
    elif stray.others == stray.open_end and not checked.entries:
        checked.unchained = stray.older
    else:
        checked.fault = f"line {stray.first_line}: is no entry of the chain"


def _may_be_torn(line: bytes) -> bool:
    """Whether a line is what a process leaves that ends while it writes an entry: the beginning of a JSON object."""
    text = line.removesuffix(b"\n")
    return (
        BEGINNING.startswith(text[: len(BEGINNING)])
        and text.isascii()
        and text.decode("ascii").isprintable()
    )


def _torn(first: int, last: int, told: str) -> str:
    """Another process may end while it writes behind a torn line, so that there are several."""
    lines = f"line {first}: is" if first == last else f"lines {first} to {last}: are"
    left = "a process that ends while it writes leaves such a line, and its reply does not leave"
    return (
        f"{lines} torn: {left}; so does who spoils the last entry, which a hash noted before would"
        f" show; {told}"
    )
