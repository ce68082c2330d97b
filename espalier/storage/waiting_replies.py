"""Replies of a site that wait for a person's approval: ``<state-dir>/<run>/<site>/waiting``.

A waiting reply is a sealed document of the data that would leave: its entry in the egress log, its
fields with their values, and the hashes of all its blobs. The blobs are stored next to the document
as safetensors files. A decision is a sealed document of its own. After a decision the blobs are
deleted, and the documents stay as long as the client state of the run.

Covers: a change to the bytes of a document, a decision or a blob is found before a decision is
made; a decision applies to one reply, which is identified by the hash of its content.
Does not cover: a person with the right to write there, who can also decide.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, InputError
from espalier.storage.atomic import digest, read_sealed, sealed, write_bytes
from espalier.storage.blobs import BlobStore
from espalier.storage.client_state import WAITING, is_ours, private_folder
from espalier.storage.directory_lock import OWNER_ONLY_FILE, in_turn

VERSION = 1
"""Version of the documents."""
ID_LENGTH = 12
"""Hexadecimal digits of a reply's short id."""
IDENTITY = ("lineage", "site", "method", "round", "client", "kind", "part")
"""Keys of the log entry that identify a reply; attempts of one message are the same reply."""


@dataclass(frozen=True)
class WaitingReply:
    """Reply that waits for approval."""

    entry: Mapping[str, Any]
    """Entry of the reply in the egress log, with run, site and time."""
    fields: Mapping[str, Any]
    """Fields of the reply with their values."""
    later: Sequence[Mapping[str, Any]]
    """Blobs of later parts, which are approved together with the reply.

    The format is that of the egress log. The blobs of the first part are in ``entry``.
    """

    @property
    def digest(self) -> str:
        """Hash of the whole content of the reply."""
        # The time of the entry is left out: a repeated attempt is the same reply.
        identity = {key: self.entry[key] for key in IDENTITY}
        blobs = {blob["name"]: blob["sha256"] for blob in self.entry["blobs"]}
        return digest([identity, dict(self.fields), blobs, [blob["sha256"] for blob in self.later]])

    @property
    def id(self) -> str:
        """Short id by which a person refers to the reply."""
        return self.digest[:ID_LENGTH]

    @property
    def blobs(self) -> list[Mapping[str, Any]]:
        """All blobs, including those of later parts."""
        return [*self.entry["blobs"], *self.later]

    @property
    def num_bytes(self) -> int:
        """Size of the reply and its later parts in bytes."""
        return int(self.entry["bytes"]) + sum(blob["bytes"] for blob in self.later)


@dataclass(frozen=True)
class Decision:
    """Decision of a person on a reply."""

    approved: bool
    """True if the reply may leave the site."""
    time: str
    by: str
    """Name of the person who decided."""
    reason: str = ""


class WaitingReplies:
    """Replies of one site in one run that wait for approval or were decided."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def undecided(self) -> tuple[list[WaitingReply], list[EspalierError]]:
        """Return the waiting replies, oldest first, and the errors of unreadable ones."""
        replies, errors = self._read_all()
        return [waiting for waiting, decision in replies if decision is None], errors

    def blobs_decided(self, server_round: int) -> dict[str, bool]:
        """Return the decisions on the blobs of a round, by hash: True if approved, else False.

        If a blob belongs to several replies, one refusal is enough to refuse it. A reply with a
        damaged document needs a new decision.
        """
        decisions: dict[str, bool] = {}
        for waiting, decision in self._read_all()[0]:
            if decision is not None and waiting.entry["round"] == server_round:
                for blob in waiting.blobs:
                    # One refusal outweighs all approvals.
                    decisions[blob["sha256"]] = (
                        decisions.get(blob["sha256"], True) and decision.approved
                    )
        return decisions

    def has(self, waiting: WaitingReply) -> bool:
        """Return True if the reply is stored here; it may wait or be decided."""
        return self._document(waiting).exists()

    def add(self, waiting: WaitingReply, blobs: Mapping[str, bytes], kept: BlobStore) -> None:
        """Store a reply with copies of its blobs.

        The copies keep the originals safe from a person who opens and overwrites one. ``blobs``
        are those of the first part by hash, ``kept`` has those of later parts.
        """
        store = BlobStore(private_folder(self.folder, waiting.id), OWNER_ONLY_FILE)
        # Copies, so that nobody changes the originals by opening a file.
        for blob in waiting.blobs:
            key = blob["sha256"]
            if not store.is_whole(key):
                store.put(blobs[key] if key in blobs else kept.get(key))
        # The document comes after the blobs, so that it never names a missing one.
        document = {
            "version": VERSION,
            "entry": waiting.entry,
            "fields": waiting.fields,
            "later": waiting.later,
            "digest": waiting.digest,
        }
        write_bytes(self._document(waiting), sealed(document), OWNER_ONLY_FILE)

    def decision(self, waiting: WaitingReply) -> Decision | None:
        """Return the decision on exactly this reply, or None; raise InputError if damaged."""
        path = self._decided(waiting)
        if not path.exists():
            return None
        document = read_sealed(path, VERSION)
        # An old decision must not apply to a reply with the same short id.
        if document["digest"] != waiting.digest:
            raise InputError(f"{path}: is a decision on another reply; remove it, and decide again")
        return Decision(**{key: document[key] for key in ("approved", "time", "by", "reason")})

    @contextmanager
    def deciding(self, waiting: WaitingReply) -> Iterator[None]:
        """Lock the decisions in the block; raise InputError if this reply is decided already."""
        # Two people cannot decide at the same time.
        with in_turn(self.folder):
            if (decision := self.decision(waiting)) is not None:
                verdict = "approved" if decision.approved else "refused"
                raise InputError(
                    f"approve: {waiting.id}: was {verdict} by {decision.by} at {decision.time},"
                    " which is final"
                )
            yield

    def require_as_shown(self, waiting: WaitingReply) -> None:
        """Raise InputError if a blob is missing or no longer the one that the document names."""
        store = BlobStore(self.folder / waiting.id)
        for blob in waiting.blobs:
            if not store.is_whole(blob["sha256"]):
                raise InputError(
                    f"{store.path(blob['sha256'])}: is missing or differs from the reply that"
                    f" waits; remove {self._document(waiting)}; the reply waits again when the"
                    " server repeats its request"
                )

    def decide(self, waiting: WaitingReply, decision: Decision) -> None:
        """Write a decision and delete the blobs; call it within ``deciding``."""
        # The decision comes first: an interruption then loses no blob that is still undecided.
        write_bytes(
            self._decided(waiting),
            sealed({"version": VERSION, "digest": waiting.digest, **decision.__dict__}),
            OWNER_ONLY_FILE,
        )
        shutil.rmtree(self.folder / waiting.id, ignore_errors=True)

    def _document(self, waiting: WaitingReply) -> Path:
        return self.folder / f"{waiting.id}.json"

    def _decided(self, waiting: WaitingReply) -> Path:
        return self.folder / f"{waiting.id}-decided.json"

    def _read_all(self) -> tuple[list[tuple[WaitingReply, Decision | None]], list[EspalierError]]:
        replies = list[tuple[WaitingReply, Decision | None]]()
        errors = list[EspalierError]()
        for path in self.folder.glob("*.json"):
            # Documents have an id as name; decisions have a longer one.
            if len(path.stem) != ID_LENGTH:
                continue
            try:
                waiting = self._read(path)
                replies.append((waiting, self.decision(waiting)))
            except EspalierError as error:
                # One damaged reply must not hide the others.
                errors.append(error)
        replies.sort(key=lambda pair: (pair[0].entry["time"], pair[0].entry["round"], pair[0].id))
        return replies, errors

    def _read(self, path: Path) -> WaitingReply:
        document = read_sealed(path, VERSION)
        waiting = WaitingReply(document["entry"], document["fields"], document["later"])
        # The name is part of the identity: a renamed document is refused.
        if document["digest"] != waiting.digest or path != self._document(waiting):
            raise InputError(
                f"{path}: does not describe the reply that its name gives; remove it; the reply"
                " waits again when the server repeats its request"
            )
        return waiting


def replies_at(root: Path) -> list[WaitingReplies]:
    """Return the stored replies of all sites and runs below a state directory."""
    return [
        WaitingReplies(folder)
        for folder in sorted(root.glob(f"*/*/{WAITING}"))
        if is_ours(folder.parent)
    ]
