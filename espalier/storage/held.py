"""Replies that wait at a site until an officer decides: ``<state-dir>/<run>/<site>/held``.

A held reply is a sealed document of what would leave (what the egress log would say of it, its scalars with their values,
and the hashes of all its blobs), and beside it the blobs themselves, as safetensors files. A decision is a sealed document
of its own; then the blobs are removed, and the documents stay as long as the run's private state.

Covers: a document, a decision or a blob whose bytes changed is found before anything is decided; a decision is for one
reply, by the hash of all that is in it.
Does not cover: somebody with the right to write there, who can also decide.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_bytes
from espalier.storage.blobs import BlobStore
from espalier.storage.hash_chain import digest
from espalier.storage.private import HELD, OWNER_ONLY_FILE, is_ours, private_folder
from espalier.storage.sealed import read_sealed, sealed

VERSION = 1
ID_LENGTH = 12
IDENTITY = ("lineage", "site", "method", "round", "client", "kind", "part")
"""What of a reply's entry says which reply it is; attempts of one message are one reply."""


@dataclass(frozen=True)
class Held:
    """A held reply."""

    entry: Mapping[str, Any]
    """What the egress log would say of it, with run, site and time."""
    scalars: Mapping[str, Any]
    later: Sequence[Mapping[str, Any]]
    """Blobs of further parts, which are released with it; as the log describes blobs, the first ones stand in ``entry``."""

    @property
    def digest(self) -> str:
        """Hash of all that would leave."""
        which = {key: self.entry[key] for key in IDENTITY}
        blobs = {blob["name"]: blob["sha256"] for blob in self.entry["blobs"]}
        return digest([which, dict(self.scalars), blobs, [blob["sha256"] for blob in self.later]])

    @property
    def id(self) -> str:
        """What an officer calls it."""
        return self.digest[:ID_LENGTH]

    @property
    def blobs(self) -> list[Mapping[str, Any]]:
        """All blobs, those of further parts too."""
        return [*self.entry["blobs"], *self.later]

    @property
    def num_bytes(self) -> int:
        """Of the reply and its further parts."""
        return int(self.entry["bytes"]) + sum(blob["bytes"] for blob in self.later)


@dataclass(frozen=True)
class Decision:
    """What an officer decided."""

    released: bool
    time: str
    by: str
    reason: str = ""


class HeldReplies:
    """The held replies of a site in a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Held]:
        """All of them, decided or not, the oldest first; raises Mistake where one is damaged."""
        yield from in_order([self._read(path) for path in self._documents()])

    def undecided(self) -> tuple[list[Held], list[Mistake]]:
        """Those on which nobody decided, the oldest first, and what is wrong with those that cannot be read."""
        found = list[Held]()
        damaged = list[Mistake]()
        for path in self._documents():
            try:
                held = self._read(path)
                if self.decision(held) is None:
                    found.append(held)
            except Mistake as mistake:
                damaged.append(mistake)
        return in_order(found), damaged

    def _documents(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if len(path.stem) == ID_LENGTH)

    def has(self, held: Held) -> bool:
        """Whether it is here, or was decided."""
        return self._document(held).exists()

    def add(self, held: Held, blobs: Mapping[str, bytes], kept: BlobStore) -> None:
        """Keep a reply, with copies of its blobs by hash: whoever opens and spoils one of them spoils nothing else."""
        store = BlobStore(private_folder(self.folder, held.id), OWNER_ONLY_FILE)
        for blob in held.blobs:
            key = blob["sha256"]
            if not store.is_whole(key):
                store.put(blobs[key] if key in blobs else kept.get(key))
        document = {
            "version": VERSION,
            "entry": held.entry,
            "scalars": held.scalars,
            "later": held.later,
            "digest": held.digest,
        }
        write_bytes(self._document(held), sealed(document), OWNER_ONLY_FILE)

    def decision(self, held: Held) -> Decision | None:
        """What was decided of exactly this reply; None as yet.

        Raises
        ------
        Mistake
            The decision is damaged, or of another reply.
        """
        path = self._decided(held)
        if not path.exists():
            return None
        found = read_sealed(path, VERSION)
        if found["digest"] != held.digest:
            raise Mistake(f"{path}: is a decision on another reply; remove it, and decide again")
        return Decision(**{key: found[key] for key in ("released", "time", "by", "reason")})

    @contextmanager
    def deciding(self, held: Held) -> Iterator[None]:
        """Nobody else decides on a reply of this folder in the block.

        Raises
        ------
        Mistake
            Somebody has decided on this one, which is final.
        """
        with open(
            self.folder / "deciding.lock", "ab", opener=partial(os.open, mode=OWNER_ONLY_FILE)
        ) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (decision := self.decision(held)) is not None:
                word = "released" if decision.released else "refused"
                raise Mistake(
                    f"release: {held.id}: was {word} by {decision.by} at {decision.time}, which is"
                    " final"
                )
            yield

    def require_as_shown(self, held: Held) -> None:
        """Raise Mistake where a blob is not, or no longer, the one that the document names."""
        store = BlobStore(self.folder / held.id)
        for blob in held.blobs:
            if not store.is_whole(blob["sha256"]):
                raise Mistake(
                    f"{store.path(blob['sha256'])}: is not what is held: its bytes changed, or it"
                    f" is gone; remove {self._document(held)}, and the reply is held anew when the"
                    " server asks again"
                )

    def decide(self, held: Held, decision: Decision) -> None:
        """Write a decision down, within ``deciding``; the blobs are needed no more."""
        write_bytes(
            self._decided(held),
            sealed({"version": VERSION, "digest": held.digest, **decision.__dict__}),
            OWNER_ONLY_FILE,
        )
        shutil.rmtree(self.folder / held.id, ignore_errors=True)

    def blobs_decided(self, server_round: int) -> dict[str, bool]:
        """Hashes of all blobs of a round that were decided on, and whether they were released; one refusal counts for more."""
        found: dict[str, bool] = {}
        for held, decision in self._decided_ones():
            if held.entry["round"] == server_round:
                for blob in held.blobs:
                    found[blob["sha256"]] = found.get(blob["sha256"], True) and decision.released
        return found

    def _decided_ones(self) -> Iterator[tuple[Held, Decision]]:
        """Those that can be read; what a damaged document would let out is held anew."""
        for path in self._documents():
            with suppress(Mistake):
                held = self._read(path)
                if (decision := self.decision(held)) is not None:
                    yield held, decision

    def _document(self, held: Held) -> Path:
        return self.folder / f"{held.id}.json"

    def _decided(self, held: Held) -> Path:
        return self.folder / f"{held.id}-decided.json"

    def _read(self, path: Path) -> Held:
        found = read_sealed(path, VERSION)
        held = Held(found["entry"], found["scalars"], found["later"])
        if found["digest"] != held.digest or path != self._document(held):
            raise Mistake(
                f"{path}: does not describe the reply that it is named for; remove it, and the"
                " reply is held anew"
            )
        return held


def in_order(found: Sequence[Held]) -> list[Held]:
    """The oldest first."""
    return sorted(found, key=lambda held: (held.entry["time"], held.entry["round"], held.id))


def held_at(root: Path) -> list[HeldReplies]:
    """The held replies of all sites and runs below a state directory."""
    return [
        HeldReplies(folder) for folder in sorted(root.glob(f"*/*/{HELD}")) if is_ours(folder.parent)
    ]
