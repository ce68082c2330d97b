"""State of one run that every strategy receives."""

from dataclasses import dataclass, field

import torch
from flwr.serverapp import Grid

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.identity.site_keys import PublicKeys
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.storage.activity import AtWork
from strategies.base.checkpoint import CheckpointFolder
from strategies.base.progress import Clock, Progress
from strategies.base.rounds import Rounds
from strategies.base.run_folder import RunFolder


@dataclass
class Run:
    """Settings, dense model, message exchange and output folder of a run."""

    settings: RunSettings
    model: OpenedModel
    folder: RunFolder
    lineage: str
    """Name of the run at its clients, also after a resumption: letters, digits and hyphens."""
    grid: Grid
    clock: Clock = field(default_factory=Clock)
    simulation: bool = False
    computing: Computing = field(
        default_factory=lambda: Computing(torch.device("cpu"), torch.float32, 1)
    )
    """Device, dtype and number of threads of the server's computations."""
    site_keys: PublicKeys | None = None
    """Public keys of the sites that may take part; None if site names are not bound to keys."""
    seconds_before: float = field(init=False)
    """Seconds that the run had taken when it was interrupted; 0 for a new run."""
    progress: Progress = field(init=False)
    checkpoint: CheckpointFolder = field(init=False)
    rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock.now()
        self.seconds_before = self.folder.load_times().run
        self.progress = Progress(self.folder, self.clock)
        self.checkpoint = CheckpointFolder(self.folder.checkpoint)
        self.rounds = Rounds(
            self.grid,
            self.settings,
            self.model.plan,
            self.lineage,
            self.folder,
            self.progress,
            self.clock,
            shared_workers=self.simulation,
            work=AtWork(NodeSettings().state_root(), self.lineage) if self.simulation else None,
        )

    @property
    def device(self) -> torch.device:
        """Device on which the server counts votes."""
        return self.computing.device

    def seconds(self) -> float:
        """Return the seconds of the run so far, including the parts before a resumption."""
        # A monotonic clock: time before the interruption comes from the file.
        return self.seconds_before + self.clock.now() - self._started

    def identity(self) -> dict[str, str]:
        """Return the hashes that a resumed run must have in common with the interrupted one."""
        return identity(self.settings, self.model)


def identity(settings: RunSettings, model: OpenedModel) -> dict[str, str]:
    """Return the hashes of settings and model that identify a run in its checkpoint."""
    return {"settings": settings.digest(), "model": model.sha256}
