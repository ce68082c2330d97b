"""Log of everything that left a site in a run, and its check (``espalier check-log``).

The file is ``<state-dir>/egress/<lineage>-<site>.jsonl``. In addition to replies, it has entries
for replies that needed approval: ``held``, ``released`` and ``refused``, each with its time.

Covers and does not cover: see ``storage/hash_chain``. A log whose last entries were removed still
passes the check. ``--head`` detects such a removal, with a hash that was noted earlier.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from espalier.amounts import count
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.identity.names import without_control
from espalier.messages.contract import Side
from espalier.messages.message import Fields, MessageBody
from espalier.messages.records import num_bytes
from espalier.messages.tensor_blobs import TensorSpec
from espalier.storage.blobs import sha256
from espalier.storage.chain_check import Checked, chain_check
from espalier.storage.client_state import OWNER_ONLY_FILE, private_folder
from espalier.storage.hash_chain import HashChain

FOLDER = "egress"


def egress_log(root: Path, lineage: str, site: str) -> HashChain:
    """Return the egress log of a site in a run; ``root`` is the site's ``state-dir``."""
    folder = private_folder(root, FOLDER)
    return HashChain(
        folder / f"{lineage}-{site}.jsonl", {"lineage": lineage, "site": site}, OWNER_ONLY_FILE
    )


def now() -> str:
    """Return the current UTC time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def reply_entry(
    body: MessageBody, content: RecordDict, side: Side, fields: Fields
) -> dict[str, Any]:
    """Return the log entry of a reply that matches ``side`` of its contract.

    It contains round, client and kind of the reply, and names, dtypes, shapes, sizes and SHA-256 of
    its contents, but no values. ``content`` is the reply as it is sent, and ``fields`` are those
    that the check returned.
    """
    header = body.header
    specs = side.specs(fields)
    hashes = {} if side.blob_sha256 is None else side.blob_sha256(fields)
    return {
        "entry": "reply",
        "method": header.method,
        "round": header.server_round,
        "client": header.client,
        "kind": header.kind,
        "part": header.part,
        "status": header.status,
        "fields": sorted(body.fields),
        "bytes": num_bytes(content),
        "blobs": [
            described(key, blob, hashes.get(key) or sha256(blob), specs[key])
            for key, blob in sorted(body.blobs.items())
        ],
    }


def described(
    name: str, blob: bytes, digest: str, specs: Mapping[str, TensorSpec]
) -> dict[str, Any]:
    """Return the part of a log entry that describes one blob, its SHA-256 and its tensors."""
    tensors = {
        tensor: {"dtype": spec.dtype, "shape": list(spec.shape)} for tensor, spec in specs.items()
    }
    return {"name": name, "bytes": len(blob), "sha256": digest, "tensors": tensors}


BROKEN = 1
UNKNOWN = 2
TORN = 3


def logs_of(where: Path) -> list[Path]:
    """Return the egress logs of a state directory, or the log file itself if ``where`` is one."""
    try:
        if where.is_file():
            return [where]
        # Unlike ``glob``, ``iterdir`` reports a directory that cannot be read.
        files = (where / FOLDER).iterdir() if where.is_dir() else ()
        found = sorted(path for path in files if path.suffix == ".jsonl")
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


def findings(path: Path, checked: Checked) -> Iterator[str]:
    """Yield the findings for one log, line by line."""
    yield str(path)
    if is_renamed(path, checked):
        yield "  RENAMED  belongs to another run or site than its name says: it was moved here"
    if checked.origin is not None:
        yield f"  run {checked.origin['lineage']}, site {checked.origin['site']}"
        counts = [
            f"{number} {'replies' if kind == 'reply' and number != 1 else kind}"
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
    """Return a noted hash in lower case, as it appears in the logs."""
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


def code_of(path: Path, checked: Checked) -> int:
    """Return the exit code for one log."""
    if checked.fault or is_renamed(path, checked):
        return BROKEN
    return (TORN if checked.torn else 0) if checked.entries else UNKNOWN


def main(given: Mapping[str, Any]) -> int:
    """Check logs, print the findings, and return the exit code.

    The code is 0 if all logs are complete, 1 if a log is broken or lacks a noted hash, 2 if a log
    has no chain or cannot be read. It is 3 if the only problem is a log with torn lines, which
    might be damaged entries.
    """
    codes = set[int]()
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
            codes.add(UNKNOWN)
        else:
            # A manipulated log may contain control characters.
            for line in findings(path, checked):
                print(without_control(line, keep=""), flush=True)
            for head, number in checked.seen.items():
                missing.discard(head)
                print(
                    f"  the noted hash is that of entry {number} of {checked.entries}: no entry"
                    " up to it is missing"
                )
            codes.add(code_of(path, checked))
    for head in sorted(missing):
        print(
            f"BROKEN     no entry has the noted hash {head}: the entries up to it were removed"
            " or replaced"
        )
    codes |= {BROKEN} if missing else set()
    return next((code for code in (BROKEN, UNKNOWN, TORN) if code in codes), 0)
