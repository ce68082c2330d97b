"""Whether egress logs are whole; ``espalier check-log`` does it.

Covers and does not cover: see ``storage/hash_chain``. A log whose end was cut off is whole; ``--head`` finds that, with a hash
that was noted before.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.storage.chain_check import Checked, chain_check
from espalier.wire.printable import without_control

FOLDER = "egress"
KINDS = {"reply": ("reply", "replies"), "held": ("held",) * 2, "released": ("released",) * 2, "refused": ("refused",) * 2}
"""What entries are called, one and several."""
BROKEN, UNKNOWN = 1, 2


def logs_of(where: Path) -> list[Path]:
    """The logs of a state directory, or the one that is named.

    Raises
    ------
    Mistake
        There is none.
    """
    if where.is_file():
        return [where]
    found = sorted((where / FOLDER).glob("*.jsonl")) if where.is_dir() else []
    if not found:
        raise Mistake(f"check-log: {where}: is no egress log, and no state directory or run directory with any")
    return found


def described(path: Path, checked: Checked) -> Iterator[str]:
    """What was found in a log, a line each."""
    yield str(path)
    if is_renamed(path, checked):
        yield "  RENAMED  is of another run or site than its name says: somebody moved it here"
    if checked.origin is not None:
        yield f"  run {checked.origin['lineage']}, site {checked.origin['site']}"
        counts = [f"{number} {KINDS.get(kind, (kind,) * 2)[number != 1]}" for kind, number in sorted(checked.kinds.items())]
        when = f"{checked.first} to {checked.last}"
        yield f"  {checked.entries} entries ({', '.join(counts)}), {when}; {checked.num_bytes:,} bytes left"
    yield from (f"  {note}" for note in checked.notes)
    if checked.fault:
        yield f"  BROKEN   {checked.fault}"
        if checked.entries:
            yield f"  whole as far as entry {checked.entries}, {checked.head}"
    elif checked.entries:
        yield f"  whole    head {checked.head}"
    elif checked.unchained:
        yield f"  NO CHAIN {checked.unchained} entries of a release whose log had none; what was done to them cannot be found"
    else:
        yield "  EMPTY    there is no entry"


def is_renamed(path: Path, checked: Checked) -> bool:
    """Whether a log stands where another run's or site's belongs; one that was copied elsewhere may be called as one likes."""
    return checked.origin is not None and path.parent.name == FOLDER and path.stem != "-".join(checked.origin.values())


def shown(line: str) -> str:
    """A line without control characters, of which a log that somebody wrote may be full."""
    return without_control(line, keep="")


def main(given: Mapping[str, Any]) -> int:
    """Check logs; 0 if all are whole, 1 if one is broken or lacks a noted hash, 2 if one has no chain or is not read."""
    wanted: Sequence[str] = given["heads"]
    missing, code = set(wanted), 0
    try:
        for path in logs_of(Path(given["where"]).expanduser()):
            checked = chain_check(path, wanted)
            print("\n".join(map(shown, described(path, checked))), flush=True)
            for head, number in checked.seen.items():
                missing.discard(head)
                print(f"  the noted hash is that of entry {number} of {checked.entries}: nothing up to it is missing")
            code = BROKEN if checked.fault or is_renamed(path, checked) else code or (0 if checked.entries else UNKNOWN)
    except Mistake as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return UNKNOWN
    for head in sorted(missing):
        print(f"BROKEN     no entry has the noted hash {head}: what ended with it was cut off, or made anew")
    return BROKEN if missing else code
