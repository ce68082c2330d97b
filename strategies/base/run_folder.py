"""Files of one run that a strategy writes while it runs."""

import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.identity.names import STAMP, lineage_of
from espalier.messages.ledger import Ledger, dense_bytes_of, timed_in
from espalier.settings.run import RunSettings
from espalier.storage.atomic import JsonLines, write_json

SECONDS = "seconds.json"


def cannot_be_made(settings: RunSettings, path: Path, why: str | None) -> InputError:
    """Return the error for a run directory that cannot be made."""
    return InputError(
        f"out-dir = {settings.out_dir!r}: {path} cannot be made ({why}); name another directory"
    )


@dataclass(frozen=True)
class Times:
    """Time that a run has taken so far, including the parts before it was resumed."""

    run: float = 0.0
    """Seconds since the start of the server, without gaps before a resumption."""
    clients: dict[str, list[float]] = field(default_factory=dict)
    """Seconds and rounds of work of each client."""


class _Lines(JsonLines):
    """JSON Lines file that is only appended to while the run directory exists.

    Appending creates missing directories, and a new directory with one file would look like a run.
    """

    def __init__(self, folder: "RunFolder", name: str) -> None:
        super().__init__(folder.path / name)
        self._folder = folder

    def append(self, entry: dict[str, Any]) -> None:
        # After a removal of the directory, a line must not bring it back.
        self._folder.require_there()
        super().append(entry)


@dataclass
class RunFolder:
    """Directory of a run.

    It holds ``metrics.jsonl``, ``ledger.jsonl``, ``seconds.json``, ``checkpoint/`` and ``inbox/``
    (replies of the open round).
    """

    path: Path
    dense_bytes: InitVar[Mapping[str, int]] = MappingProxyType({})
    """Bytes of each block's dense matrices, which the ledger compares with blobs."""
    metrics: JsonLines = field(init=False)
    ledger: Ledger = field(init=False)
    _written: JsonLines = field(init=False)
    _handle: int = field(init=False)

    def __post_init__(self, dense_bytes: Mapping[str, int]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # An open handle keeps the inode, so that no other directory can be taken for this one.
        self._handle = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self.metrics = _Lines(self, "metrics.jsonl")
        self._written = _Lines(self, "ledger.jsonl")
        self.ledger = Ledger(self._written.append, dense_bytes)

    @staticmethod
    def of_new_run(
        settings: RunSettings, model: OpenedModel, run_id: str
    ) -> "tuple[RunFolder, str]":
        """Make the directory of a new run in ``out-dir``; return it and the run's lineage.

        Raises InputError if it cannot be made.
        """
        # Two runs may start in the same second, so the run's id is part of the name.
        stamp = datetime.now().strftime(STAMP)
        path = at_home(settings.out_dir).absolute() / f"{stamp}-{settings.method}-{run_id}"
        try:
            return RunFolder(path, dense_bytes_of(model.plan)), lineage_of(stamp, run_id)
        except OSError as error:
            raise cannot_be_made(settings, path, error.strerror) from None

    def is_there(self) -> bool:
        """Return whether the directory is still the one that was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def require_there(self) -> None:
        """Raise InputError if the directory was removed or moved."""
        if not self.is_there():
            raise InputError(f"{self.path}: was removed or moved while the run was working")

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint."""
        return self.path / "checkpoint"

    def require_not_begun(self) -> None:
        """Raise InputError if ``metrics.jsonl`` has a finished round, but no checkpoint is left."""
        # The last line may be cut off by a crash, so the file is not parsed.
        if self.metrics.path.exists() and '"event": "checkpoint"' in self.metrics.path.read_text(
            errors="replace"
        ):
            raise InputError(
                f"{self.checkpoint}: is missing or empty, but {self.metrics.path.name} lists"
                " finished rounds; restore it from a backup, or start a new run (resume-from ="
                " '')"
            )

    def restore_ledger(self, state: list[list[int]]) -> None:
        """Continue the ledger from the sums of a checkpoint.

        Times that the ledger file already has are not written again.
        """
        try:
            self.ledger.restore(state, timed_in(self._written.path))
        except OSError as error:
            raise InputError(f"{self._written.path}: cannot be read: {error.strerror}") from None

    @property
    def masked_sums(self) -> Path:
        """Folder of masked sums that an interrupted run still has to unmask."""
        return self.path / "secure-sum"

    @property
    def inbox(self) -> Path:
        """Directory of the open round's replies."""
        return self.path / "inbox"

    def save_times(self, times: Times) -> None:
        """Write the time that the run has taken so far.

        The file lies next to the checkpoint, because equal runs have equal checkpoints.
        """
        write_json(self.path / SECONDS, {"run": times.run, "clients": times.clients})

    def load_times(self) -> Times:
        """Return the times that were written last, or zeros if there are none."""
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
            # NaN and negative numbers can only come from damage.
            if not all(0 <= number < math.inf for number in [times.run, *chain(*clients.values())]):
                raise ValueError
            return times
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise InputError(
                f"{path}: is damaged; remove it (it contains only the durations of the run and"
                " its clients)"
            ) from None
