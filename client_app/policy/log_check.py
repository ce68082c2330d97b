"""Check of egress logs for completeness (``espalier check-log``).

Covers and does not cover: see ``storage/hash_chain``. A log whose last entries were removed still
passes the check. ``--head`` detects such a removal, with a hash that was noted earlier.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espalier.amounts import count
from espalier.environment.home_folder import at_home
from espalier.errors import EspalierError, InputError
from espalier.identity.printable import without_control
from espalier.storage.chain_check import Checked, chain_check

FOLDER = "egress"
KINDS = {
    "reply": ("reply", "replies"),
    "held": ("held",) * 2,
    "released": ("released",) * 2,
    "refused": ("refused",) * 2,
}
"""Names of entry kinds, as singular and plural."""
BROKEN = 1
UNKNOWN = 2
TORN = 3


def logs_of(where: Path) -> list[Path]:
    """Return the egress logs of a state directory, or the log file itself if ``where`` is one.

    Raises
    ------
    InputError
        There is no log, or the directory cannot be read.
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
        raise InputError(
            f"check-log: {where}: cannot be read ({error.strerror}); run the command as the"
            " node's user"
        ) from None
    if not found:
        raise InputError(
            f"check-log: {where}: is not an egress log, and not a state directory or run"
            " directory with such logs"
        )
    return found


def described(path: Path, checked: Checked) -> Iterator[str]:
    """Yield the findings for one log, line by line."""
    yield str(path)
    if is_renamed(path, checked):
        yield "  RENAMED  belongs to another run or site than its name says: it was moved here"
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
            yield f"  intact up to entry {checked.entries}, {checked.head}"
    elif checked.entries:
        yield f"  intact   head {checked.head}"
    elif checked.unchained:
        entries = count(checked.unchained, "entry", "entries")
        yield (
            f"  NO CHAIN {entries} of a release without a chain; changes to them cannot be detected"
        )
    else:
        yield "  EMPTY    the log has no entry"


def noted(word: str) -> str:
    """Return a noted hash in lower case, as it appears in the logs.

    Raises
    ------
    InputError
        ``word`` is not a complete SHA-256 in hexadecimal.
    """
    if re.fullmatch("[0-9a-fA-F]{64}", word) is None:
        raise InputError(
            f"--head {word[:80]!r}: is not a hash; give all 64 characters that check-log printed"
            " after 'head'"
        )
    return word.lower()


def is_renamed(path: Path, checked: Checked) -> bool:
    """Return whether a log in an egress folder has the name of another run or site.

    A copy outside an egress folder may have any name.
    """
    return (
        checked.origin is not None
        and path.parent.name == FOLDER
        and path.stem != "-".join(checked.origin.values())
    )


def shown(line: str) -> str:
    """Return a line without control characters, which a manipulated log may contain."""
    return without_control(line, keep="")


def code_of(path: Path, checked: Checked) -> int:
    """Return the exit code for one log."""
    if checked.fault or is_renamed(path, checked):
        return BROKEN
    return (TORN if checked.torn else 0) if checked.entries else UNKNOWN


def worst(one: int, other: int) -> int:
    """Return the more severe of two exit codes."""
    return next((code for code in (BROKEN, UNKNOWN, TORN) if code in (one, other)), 0)


def main(given: Mapping[str, Any]) -> int:
    """Check logs, print the findings, and return the exit code.

    Returns
    -------
    int
        0 if all logs are complete, 1 if a log is broken or lacks a noted hash, 2 if a log has no
        chain or cannot be read. 3 if the only problem is a log with torn lines, which might be
        damaged entries.
    """
    code = 0
    try:
        wanted = [noted(word) for word in given["heads"]]
        logs = logs_of(at_home(given["where"]))
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return UNKNOWN
    missing = set(wanted)
    for path in logs:
        try:
            checked = chain_check(path, wanted)
        except EspalierError as error:
            print(f"espalier: {error}", file=sys.stderr)
            code = worst(code, UNKNOWN)
        else:
            print("\n".join(map(shown, described(path, checked))), flush=True)
            for head, number in checked.seen.items():
                missing.discard(head)
                print(
                    f"  the noted hash is that of entry {number} of {checked.entries}: no entry"
                    " up to it is missing"
                )
            code = worst(code, code_of(path, checked))
    for head in sorted(missing):
        print(
            f"BROKEN     no entry has the noted hash {head}: the entries up to it were removed"
            " or replaced"
        )
    return BROKEN if missing else code
