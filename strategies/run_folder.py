"""The files of one run that a strategy writes while it works."""

from dataclasses import dataclass, field
from pathlib import Path

from espalier.storage.json_lines import JsonLines
from espalier.wire.ledger import Ledger


@dataclass
class RunFolder:
    """A run directory: ``metrics.jsonl``, ``ledger.jsonl``, ``checkpoint/`` and ``inbox/`` (replies of the open round)."""

    path: Path
    metrics: JsonLines = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.ledger = Ledger(JsonLines(self.path / "ledger.jsonl").append)

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint."""
        return self.path / "checkpoint"

    @property
    def inbox(self) -> Path:
        """Directory of the open round's replies."""
        return self.path / "inbox"
