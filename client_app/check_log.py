"""Whether egress logs are whole; ``espalier check-log`` does it.

Covers and does not cover: see ``storage/hash_chain``. A log whose end was cut off is whole; ``--head`` finds that, with a hash
that was noted before.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espalier.amounts import count
from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake
from espalier.storage.chain_check import Checked, chain_check
from espalier.wire.printable import without_control

FOLDER = "egress"
KINDS = {
    "reply": ("reply", "replies"),
    "held": ("held",) * 2,
    "released": ("released",) * 2,
    "refused": ("refused",) * 2,
}
"""What entries are called, one and several."""
BROKEN = 1
UNKNOWN = 2
TORN = 3


def logs_of(where: Path) -> list[Path]:
    """The logs of a state directory, or the one that is named.

    Raises
    ------
    Mistake
        There is none.
    """
    try:
        if where.is_file():
            return [where]
        found = (
            sorted(path for path in (where / FOLDER).iterdir() if path.suffix == ".jsonl")
            if where.is_dir()
            else []
        )
    except FileNotFoundError:
        found = []
    except OSError as error:
        raise Mistake(
            f"check-log: {where}: cannot be read ({error.strerror}); look as the node's account"
        ) from None
    if not found:
        raise Mistake(
            f"check-log: {where}: is no egress log, and no state directory or run directory"
            " with any"
        )
    return found


def described(path: Path, checked: Checked) -> Iterator[str]:
    """What was found in a log, a line each."""
    yield str(path)
    if is_renamed(path, checked):
        yield "  RENAMED  is of another run or site than its name says: somebody moved it here"
    if checked.origin is not None:
        yield f"  run {checked.origin['lineage']}, site {checked.origin['site']}"
        counts = [
            f"{number} {KINDS.get(kind, (kind,) * 2)[number != 1]}"
            for kind, number in sorted(checked.kinds.items())
        ]
        when = f"{checked.first} to {checked.last}"
        entries = count(checked.entries, "entry", "entries")
        left = count(checked.num_bytes, "byte")
        yield f"  {entries} ({', '.join(counts)}), {when}; {left} left"
    yield from (f"  {note}" for note in checked.notes)
    if checked.fault:
        yield f"  BROKEN   {checked.fault}"
        if checked.entries:
            yield f"  whole as far as entry {checked.entries}, {checked.head}"
    elif checked.entries:
        yield f"  whole    head {checked.head}"
    elif checked.unchained:
        entries = count(checked.unchained, "entry", "entries")
        yield (
            f"  NO CHAIN {entries} of a release whose log had none; what was done to them cannot be"
            " found"
        )
    else:
        yield "  EMPTY    there is no entry"


def noted(word: str) -> str:
    """A hash that somebody noted, in the letters that logs have.

    Raises
    ------
    Mistake
        It is none, or not all of it.
    """
    if re.fullmatch("[0-9a-fA-F]{64}", word) is None:
        raise Mistake(
            f"--head {word[:80]!r}: is no hash; give all 64 characters that check-log printed"
            " behind 'head'"
        )
    return word.lower()


def is_renamed(path: Path, checked: Checked) -> bool:
    """Whether a log stands where another run's or site's belongs; one that was copied elsewhere may be called as one likes."""
    return (
        checked.origin is not None
        and path.parent.name == FOLDER
        and path.stem != "-".join(checked.origin.values())
    )


def shown(line: str) -> str:
    """A line without control characters, of which a log that somebody wrote may be full."""
    return without_control(line, keep="")


def code_of(path: Path, checked: Checked) -> int:
    """What a log is worth."""
    if checked.fault or is_renamed(path, checked):
        return BROKEN
    return (TORN if checked.torn else 0) if checked.entries else UNKNOWN


def worst(one: int, other: int) -> int:
    """Of two exit codes the one that says more."""
    return next((code for code in (BROKEN, UNKNOWN, TORN) if code in (one, other)), 0)


def main(given: Mapping[str, Any]) -> int:
    """Check logs: 0 if all are whole, 1 if one is broken or lacks a noted hash, 2 if one has no chain or is not read.

    3 where nothing else is wrong and one has torn lines, which somebody may have made of entries.
    """
    code = 0
    try:
        wanted = [noted(word) for word in given["heads"]]
        logs = logs_of(at_home(given["where"]))
    except Mistake as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return UNKNOWN
    missing = set(wanted)
    for path in logs:
        try:
            checked = chain_check(path, wanted)
        except Mistake as mistake:
            print(f"espalier: {mistake}", file=sys.stderr)
            code = worst(code, UNKNOWN)
        else:
            print("\n".join(map(shown, described(path, checked))), flush=True)
            for head, number in checked.seen.items():
                missing.discard(head)
                print(
                    f"  the noted hash is that of entry {number} of {checked.entries}: nothing up"
                    " to it is missing"
                )
            code = worst(code, code_of(path, checked))
    for head in sorted(missing):
        print(
            f"BROKEN     no entry has the noted hash {head}: what ended with it was cut off, or"
            " made anew"
        )
    return BROKEN if missing else code
