"""Replies that left each site, from its egress log, whose chain of hashes is verified."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from espalier.results.finished_run import FinishedRun
from espalier.storage.hash_chain import Checked, chain_check

FOLDER = "egress"
FIRST_ENTRIES = 3
"""Number of entries at the beginning of a log that the report shows."""


@dataclass
class Replies:
    """Replies of one kind that left a site."""

    kind: str
    number: int = 0
    num_bytes: int = 0
    fields: set[str] = field(default_factory=set)
    """Names of the fields."""
    tensors: int = 0
    dtypes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class SiteLog:
    """Egress log of one site, up to the first fault of its chain of hashes."""

    site: str
    file: str
    checked: Checked
    """Result of the verification of the chain of hashes."""
    kinds: dict[str, Replies]
    beginning: list[str]
    """First entries of the log, as they are."""


def site_logs(run: FinishedRun) -> list[SiteLog]:
    """Return the egress logs in the run directory, which only a simulation has.

    Raises InputError if a log cannot be read.
    """
    return [_site_log(path) for path in sorted((run.path / FOLDER).glob("*.jsonl"))]


def _site_log(path: Path) -> SiteLog:
    kinds: dict[str, Replies] = {}
    checked = chain_check(path, on_entry=partial(_count, kinds))
    with open(path, encoding="utf-8", errors="replace") as file:
        beginning = [line.strip() for line in islice(file, FIRST_ENTRIES)]
    return SiteLog(
        checked.origin["site"] if checked.origin else path.stem,
        path.name,
        checked,
        kinds,
        beginning,
    )


def _count(kinds: dict[str, Replies], entry: Mapping[str, Any]) -> None:
    """Add an entry if it is a reply."""
    if entry.get("entry") != "reply":
        return
    kind = str(entry.get("kind"))
    replies = kinds.setdefault(kind, Replies(kind))
    replies.number += 1
    replies.num_bytes += entry.get("bytes", 0)
    replies.fields |= set(entry.get("fields", ()))
    for blob in entry.get("blobs", ()):
        tensors = blob.get("tensors", {})
        replies.tensors += len(tensors)
        replies.dtypes |= {str(tensor.get("dtype")) for tensor in tensors.values()}
