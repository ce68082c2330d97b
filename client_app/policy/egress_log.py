"""Log of everything that left a site in a run, and its check (``espalier check-log``).

The file is ``<state-dir>/egress/<lineage>-<site>.jsonl``. In addition to replies, it has entries
for replies that needed approval: ``waiting``, ``approved`` and ``refused``, each with its time.

Covers and does not cover: see ``storage/hash_chain``. A log whose last entries were removed still
passes the check. ``--head`` detects such a removal, with a hash that was noted earlier.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from espalier.amounts import count
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, tell
from espalier.identity.names import without_control
from espalier.messages.contract import Side
from espalier.messages.message import Fields, MessageBody
from espalier.messages.records import num_bytes
from espalier.messages.tensor_blobs import TensorSpec
from espalier.storage.blobs import sha256
from espalier.storage.client_state import private_folder
from espalier.storage.hash_chain import Checked, HashChain, chain_check

FOLDER = "egress"


def egress_log(root: Path, lineage: str, site: str) -> HashChain:
    """Return the egress log of a site in a run; ``root`` is the site's ``state-dir``."""
    folder = private_folder(root, FOLDER)
    return HashChain(folder / f"{lineage}-{site}.jsonl", {"lineage": lineage, "site": site})


def now() -> str:
    """Return the current UTC time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def reply_entry(
    body: MessageBody, content: RecordDict, side: Side, fields: Fields
) -> dict[str, Any]:
    """Return the log entry of a reply, with descriptions of its contents but no values.

    ``content`` is the reply as it is sent, ``side`` the side of the contract against which it was
    checked, and ``fields`` are the fields that the check returned.
    """
    header = body.header
    specs = side.blobs
    # A contract with hashes verified them already, so large blobs are not hashed twice.
    hashes = {} if side.blob_sha256 is None else side.blob_sha256(fields)
    return {
        "entry": "reply",
        "method": header.method,
        "round": header.server_round,
        "client": header.client,
        "kind": header.kind,
        "part": header.part,
        "status": header.status,
        # Names only: values of fields are not in the log.
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
"""Exit codes of the check of a log, from the most severe one."""


def _logs_of(where: Path) -> list[Path]:
    """Return the egress logs of a state directory, or the log file itself."""
    try:
        paths = [where] if where.is_file() else sorted((where / FOLDER).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        raise InputError(
            f"check-log: {where}: cannot be read ({error.strerror}); run the command as the"
            " node's user"
        ) from None
    paths = [path for path in paths if path == where or path.suffix == ".jsonl"]
    if not paths:
        raise InputError(
            f"check-log: {where}: is not an egress log, and not a state directory or run"
            " directory with such logs"
        )
    return paths


def _findings(path: Path, checked: Checked) -> Iterator[str]:
    """Yield the findings for one log, line by line."""
    yield str(path)
    if _is_renamed(path, checked):
        yield "  RENAMED  belongs to another run or site than its name says: it was moved here"
    if checked.origin is not None:
        yield f"  run {checked.origin['lineage']}, site {checked.origin['site']}"
        counts = [
            count(number, "reply", "replies") if kind == "reply" else f"{number} {kind}"
            for kind, number in sorted(checked.kinds.items())
        ]
        entries = count(checked.entries, "entry", "entries")
        left = count(checked.num_bytes, "byte")
        yield (f"  {entries} ({', '.join(counts)}), {checked.first} to {checked.last}; {left} left")
    yield from (f"  {note}" for note in checked.notes)
    if checked.fault:
        yield f"  BROKEN   {checked.fault}"
        if checked.entries:
            yield f"  intact up to entry {checked.entries}, {checked.head}"
    elif checked.entries:
        yield f"  intact   head {checked.head}"
    else:
        yield "  EMPTY    the log has no entry"
    for number in checked.seen.values():
        yield (
            f"  the noted hash is that of entry {number} of {checked.entries}: no entry up to it"
            " is missing"
        )


def _noted(word: str) -> str:
    """Return a noted SHA-256 in lower case, as it appears in the logs."""
    if re.fullmatch("[0-9a-fA-F]{64}", word) is None:
        raise InputError(
            f"--head {word[:80]!r}: is not a hash; give all 64 characters that check-log printed"
            " after 'head'"
        )
    return word.lower()


def _is_renamed(path: Path, checked: Checked) -> bool:
    """Return whether a log in an egress folder has the name of another run or site.

    Logs in a run directory are named after their site only.
    """
    if checked.origin is None or path.parent.name != FOLDER:
        return False
    # The name is not part of the chain, so a renamed log is found only here.
    names = ["-".join(checked.origin.values())]
    if (path.parent.parent / "summary.json").is_file():
        names = [f"{FOLDER}-{checked.origin['site']}"]
    return path.stem not in names


def _code_of(path: Path, checked: Checked) -> int:
    """Return the exit code for one log."""
    if checked.fault or _is_renamed(path, checked):
        return BROKEN
    if not checked.entries:
        return UNKNOWN
    return TORN if checked.notes else 0


def main(given: Mapping[str, Any]) -> int:
    """Check logs, print the findings, and return the exit code.

    0 if all logs are complete, 1 if a log is broken or lacks a noted hash, 2 if a log has no entry
    or cannot be read. 3 if the only problem is a log with torn lines, which might be damaged
    entries.
    """
    codes = set[int]()
    try:
        # Hashes that no log has contained so far.
        missing = {_noted(word) for word in given["heads"]}
        logs = _logs_of(at_home(given["where"]))
    except EspalierError as error:
        tell(error)
        return UNKNOWN
    heads = sorted(missing)
    for path in logs:
        try:
            checked = chain_check(path, heads)
        except EspalierError as error:
            tell(error)
            codes.add(UNKNOWN)
        else:
            # A manipulated log may contain control characters.
            lines = [without_control(line, keep="") for line in _findings(path, checked)]
            print("\n".join(lines), flush=True)
            # A head in one of the logs suffices.
            missing -= checked.seen.keys()
            codes.add(_code_of(path, checked))
    for head in sorted(missing):
        print(
            f"BROKEN     no entry has the noted hash {head}: the entries up to it were removed"
            " or replaced"
        )
        codes.add(BROKEN)
    # The most severe finding decides.
    return next((code for code in (BROKEN, UNKNOWN, TORN) if code in codes), 0)
