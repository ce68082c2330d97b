"""The checkpoint of a run: what the server knows after the last finished round, replaced atomically.

``checkpoint/state.json`` names blobs of ``checkpoint/blobs`` by hash; it is written after they are, so a crash leaves
the previous round's checkpoint intact. It carries its own checksum (``espalier/storage/sealed.py``), and the state of the round
before stays beside it as ``previous.json``: where the last one is damaged, a person can go back to it. Round 0 is the end of
enrolment: a site keeps the number under which it was first asked, also before a round is finished.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import replacing, write_bytes
from espalier.storage.blobs import BlobStore
from espalier.storage.sealed import Damaged, read_sealed, sealed

VERSION = 4
NAMED = 3
"""Damaged blobs that are named one by one."""


class CheckpointFolder:
    """Saves and loads checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = BlobStore(
            root / "blobs", remedy="end the run and resume it, and it is told what remains"
        )

    @property
    def _last(self) -> Path:
        return self.root / "state.json"

    @property
    def _previous(self) -> Path:
        return self.root / "previous.json"

    def save(
        self,
        server_round: int,
        clients: dict[str, int],
        identity: dict[str, str],
        state: dict[str, Any],
        blobs: Collection[str] = (),
    ) -> None:
        """Save the state after a round.

        Parameters
        ----------
        server_round : the round that is finished; 0: clients are enrolled, and none was asked for anything
        clients : site -> client
        identity : hashes of settings and model, which a resumed run must share
        state : the strategy's own state, JSON values only; large data are named by their blob hash
        blobs : hashes of all blobs that the state names
        """
        document = {
            "version": VERSION,
            "round": server_round,
            "clients": clients,
            "identity": identity,
            "state": state,
        }
        with replacing(self._last) as file:
            file.write(sealed({**document, "blobs": sorted(set(blobs))}))
            # A round that is prepared has no new results.
            if self._last.exists() and self._round_of_last() != server_round:
                write_bytes(self._previous, self._last.read_bytes())

    def _round_of_last(self) -> int | None:
        try:
            return int(read_sealed(self._last, VERSION)["round"])
        except Mistake:
            return None

    def load(self, identity: dict[str, str]) -> dict[str, Any] | None:
        """The last checkpoint; None if nobody was enrolled as yet.

        Raises
        ------
        Mistake
            It, or a blob that it names, is damaged or missing: then what remains is said; or it is of another version, or of a
            run with other settings or another model.
        """
        if not self._last.exists():
            if self._previous.exists():
                raise Mistake(f"{self._last}: is missing; {self._remedy(self._last)}")
            return None
        try:
            document = read_sealed(self._last, VERSION)
        except Damaged as damaged:
            raise Mistake(f"{damaged}; {self._remedy(self._last)}") from None
        for name, value in identity.items():
            if document["identity"].get(name) != value:
                given = f"the run's {name} is not that of {self._last}"
                raise Mistake(f"resume-from: {given}; only deadlines and out-dir may differ")
        if damaged_blobs := self._damaged_blobs(document):
            raise Mistake(self._told(document, damaged_blobs))
        return document

    def _damaged_blobs(self, document: dict[str, Any]) -> list[str]:
        return [key for key in document["blobs"] if not self.blobs.is_whole(key)]

    def _told(self, document: dict[str, Any], damaged: list[str]) -> str:
        """Which blobs are damaged, what remains, and what to do."""
        files = [self.blobs.path(key) for key in damaged]
        named = ", ".join(file.name for file in files[:NAMED])
        named += f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
        of = f"of {len(document['blobs'])} blobs of the checkpoint after round {document['round']}"
        return (
            f"{self.blobs.root}: damaged or missing is {named}, {of}; the others are whole;"
            f" {self._remedy(files[0])}"
        )

    def _remedy(self, damaged: Path) -> str:
        """What remains, in words, and what to do."""
        anew = f"bring {damaged} back from a copy, or begin a new run (resume-from = '')"
        if not self._previous.exists():
            return f"no round before it remains: {anew}"
        try:
            before = read_sealed(self._previous, VERSION)
        except Mistake as error:
            return f"nothing whole remains ({error}): {anew}"
        if self._damaged_blobs(before):
            return f"the checkpoint after round {before['round']} needs damaged blobs too: {anew}"
        return (
            f"the checkpoint after round {before['round']} is whole: move {self._previous} to"
            f" {self._last} and resume again, and the run goes on from there to the same result"
        )
