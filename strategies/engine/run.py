"""One run as every strategy sees it."""

from dataclasses import dataclass, field

import torch

from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.site_keys import PublicKeys
from espalier.storage.at_work import AtWork
from espalier.wire.ledger import dense_bytes_of
from strategies.engine.checkpoint import CheckpointFolder
from strategies.engine.clock import Clock
from strategies.engine.progress import Progress
from strategies.engine.run_folder import RunFolder


@dataclass
class Run:
    """What a strategy is given: settings, the dense model, and a place to write."""

    settings: RunSettings
    model: OpenedModel
    folder: RunFolder
    lineage: str
    """Names the run to its clients, also after it was resumed: letters, digits and hyphens."""
    clock: Clock = field(default_factory=Clock)
    simulation: bool = False
    computing: Computing = field(
        default_factory=lambda: Computing(torch.device("cpu"), torch.float32, 1)
    )
    """Device, dtype and threads of what the server computes."""
    site_keys: PublicKeys | None = None
    """Of the sites that may take part, where their names are bound to keys."""
    seconds_before: float = field(init=False)
    """Seconds that the run had taken when it was interrupted; 0 for a new run."""
    progress: Progress = field(init=False)
    checkpoint: CheckpointFolder = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock.now()
        self.seconds_before = self.folder.load_times().run
        self.progress = Progress(self.folder, self.clock)
        self.checkpoint = CheckpointFolder(self.folder.checkpoint)
        self.folder.ledger.dense_bytes = dense_bytes_of(self.model.plan)

    @property
    def device(self) -> torch.device:
        """Where votes are counted."""
        return self.computing.device

    def seconds(self) -> float:
        """Return how long the run has taken so far, with its parts before a resumption."""
        return self.seconds_before + self.clock.now() - self._started

    def work(self) -> AtWork | None:
        """Where simulated clients, which are on this machine, say that they are at work; None if there are none."""
        return AtWork(NodeSettings().state_root(), self.lineage) if self.simulation else None

    def identity(self) -> dict[str, str]:
        """What a resumed run must share with the run that it continues."""
        return identity(self.settings, self.model)


def identity(settings: RunSettings, model: OpenedModel) -> dict[str, str]:
    """What a checkpoint says of the run that it is of."""
    return {"settings": settings.digest(), "model": model.sha256}
