"""JSON documents that carry a version and the SHA-256 of what they say.

Covers: bytes that changed on the disk, a file that was cut short, a value that was edited by hand.
Does not cover: somebody who writes a new checksum on purpose.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake

SEAL = "sha256"


class Damaged(Mistake):
    """A document no longer says what was written."""


def sealed(document: dict[str, Any]) -> bytes:
    """The document as a file: its entries in order of their names, and the checksum of all of them."""
    as_read = json.loads(json.dumps(document, allow_nan=False))
    return (
        json.dumps({**as_read, SEAL: _digest(as_read)}, indent=2, sort_keys=True) + "\n"
    ).encode()


def read_sealed(path: Path, version: int) -> dict[str, Any]:
    """Read a document without its checksum.

    Raises
    ------
    Damaged
        It is no JSON document, or not the one that was written.
    Mistake
        It cannot be read, or another release wrote it in another version.
    """
    try:
        document = read_json(path.read_bytes().decode())
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{path}: is damaged: it is no JSON document") from None
    if not isinstance(document, dict) or not document:
        raise Damaged(f"{path}: is damaged: it holds no document")
    found = document.get("version", 1)
    # Documents were sealed from version 2 on.
    if SEAL not in document and isinstance(found, int) and found < version:
        raise _other_version(path, found, version)
    if document.pop(SEAL, None) != _digest(document):
        raise Damaged(
            f"{path}: is damaged: it does not have its checksum, so that something in it was"
            " changed"
        )
    if found != version:
        raise _other_version(path, found, version)
    return document


def _other_version(path: Path, found: int, version: int) -> Mistake:
    return Mistake(
        f"{path}: version {found}, this program reads {version}; resume with the release that"
        " wrote it"
    )


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
