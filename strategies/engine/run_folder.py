"""The files of one run that a strategy writes while it works."""

import math
import os
import weakref
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from espalier.settings.bounded_json import read_json
from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_json
from espalier.storage.json_lines import JsonLines
from espalier.wire.ledger import Ledger, timed_in

SECONDS = "seconds.json"


@dataclass(frozen=True)
class Times:
    """Seconds that a run has taken so far, including the parts before it was resumed."""

    run: float = 0.0
    """Seconds from the start of the server, without those between an interruption and the resumption."""
    clients: dict[str, list[float]] = field(default_factory=dict)
    """Seconds and rounds of each client's work."""


class _Lines(JsonLines):
    """Lines that are appended only as long as the run's directory is there: a file in a new one would look like a run's."""

    def __init__(self, folder: "RunFolder", name: str) -> None:
        super().__init__(folder.path / name)
        self._folder = folder

    def append(self, entry: dict[str, Any]) -> None:
        self._folder.require_there()
        super().append(entry)


@dataclass
class RunFolder:
    """A run directory: ``metrics.jsonl``, ``ledger.jsonl``, ``seconds.json``, ``checkpoint/`` and ``inbox/``
    (replies of the open round)."""

    path: Path
    metrics: JsonLines = field(init=False)
    ledger: Ledger = field(init=False)
    _written: JsonLines = field(init=False)
    _handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # As long as it is open, no other directory is taken for this one.
        self._handle = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self.metrics = _Lines(self, "metrics.jsonl")
        self._written = _Lines(self, "ledger.jsonl")
        self.ledger = Ledger(self._written.append)

    def is_there(self) -> bool:
        """Return whether the directory is still the one that was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def require_there(self) -> None:
        """Raise Mistake if the directory was removed or moved."""
        if not self.is_there():
            raise Mistake(f"{self.path}: was removed or moved while the run was at work")

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint."""
        return self.path / "checkpoint"

    def require_not_begun(self) -> None:
        """Refuse to begin a run again whose rounds ``metrics.jsonl`` tells of.

        Raises
        ------
        Mistake
            A round was finished here, so that a checkpoint was written, which is gone.
        """
        if self.metrics.path.exists() and '"event": "checkpoint"' in self.metrics.path.read_text(
            errors="replace"
        ):
            raise Mistake(
                f"{self.checkpoint}: is missing or empty, but {self.metrics.path.name} tells of"
                " finished rounds; bring it back from a copy, or begin a new run (resume-from"
                " = '')"
            )

    def restore_ledger(self, state: list[list[int]]) -> None:
        """Let the ledger go on from the sums of a checkpoint, without times anew that its file has.

        Raises
        ------
        Mistake
            The file cannot be read.
        """
        try:
            self.ledger.restore(state, timed_in(self._written.path))
        except OSError as error:
            raise Mistake(f"{self._written.path}: cannot be read: {error.strerror}") from None

    @property
    def inbox(self) -> Path:
        """Directory of the open round's replies."""
        return self.path / "inbox"

    def save_times(self, times: Times) -> None:
        """Write how long the run has taken so far; beside the checkpoint, which is the same in equal runs."""
        write_json(self.path / SECONDS, {"run": times.run, "clients": times.clients})

    def load_times(self) -> Times:
        """Return what was written last; nothing has taken any time if nothing was.

        Raises
        ------
        Mistake
            The file is damaged.
        """
        path = self.path / SECONDS
        if not path.exists():
            return Times()
        try:
            saved = read_json(path.read_text())
            clients = {
                client: [float(seconds), float(rounds)]
                for client, (seconds, rounds) in saved["clients"].items()
            }
            times = Times(float(saved["run"]), clients)
            if not all(0 <= number < math.inf for number in [times.run, *chain(*clients.values())]):
                raise ValueError
            return times
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise Mistake(
                f"{path}: is damaged; remove it, nothing but how long run and clients took is in it"
            ) from None
