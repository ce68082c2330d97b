"""Weights & Biases: offline in ``wandb/`` of the run directory unless ``WANDB_MODE`` is set."""

import os
from collections.abc import Mapping
from pathlib import Path

from server_app.tracking.tracker import PROJECT, Parameter

VARIABLE = "WANDB_MODE"
OFFLINE = "offline"


class WandbTracker:
    """Run in Weights & Biases, without the machine's metrics, console output, code and git."""

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter]) -> None:
        # Nothing leaves this machine unless its user says so.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(
            mode=os.environ.get(VARIABLE, OFFLINE),
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=PROJECT,
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=dict(parameters),
            settings=settings,
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after a round."""
        self._run.log(dict(figures), step=step)

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        """Record the final figures and close the run."""
        self.log(figures, step)
        self._run.finish(exit_code=0 if completed else 1)
