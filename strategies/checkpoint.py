"""The checkpoint of a run: what the server knows after the last finished round, replaced atomically.

``checkpoint/state.json`` names blobs of ``checkpoint/blobs`` by hash; it is written after they are, so a crash leaves
the previous round's checkpoint intact.
"""

import json
from pathlib import Path
from typing import Any

from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore

VERSION = 1


class CheckpointFolder:
    """Saves and loads checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = BlobStore(root / "blobs")

    def save(self, server_round: int, ranks: dict[str, int], identity: dict[str, str], state: dict[str, Any]) -> None:
        """Save the state after a round.

        Parameters
        ----------
        server_round : the round that is finished
        ranks : site -> rank
        identity : hashes of settings and model, which a resumed run must share
        state : the strategy's own state, JSON values only; large data are named by their blob hash
        """
        document = {"version": VERSION, "round": server_round, "ranks": ranks, "identity": identity, "state": state}
        write_json(self.root / "state.json", document)

    def load(self, identity: dict[str, str]) -> dict[str, Any] | None:
        """The last checkpoint; None if no round was finished.

        Raises
        ------
        Mistake
            It is of another version, or of a run with other settings or another model.
        """
        path = self.root / "state.json"
        if not path.exists():
            return None
        document = json.loads(path.read_text())
        if document.get("version") != VERSION:
            raise Mistake(f"{path}: version {document.get('version')}, this program reads {VERSION}; resume with its release")
        for name, value in identity.items():
            if document["identity"].get(name) != value:
                raise Mistake(f"resume-from: the run's {name} is not that of {path}; only deadlines and out-dir may differ")
        return document
