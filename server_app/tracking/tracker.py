"""Interface of a tracking tool, and the choice of one."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

Parameter = str | int | float | bool
PROJECT = "espalier"
"""Name of the project or experiment that a tool shows a run in."""


class Tracker(Protocol):
    """One run in a tracking tool. Any method may raise the errors of the tool."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after a round."""

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        """Record the final figures and close the run."""


OpenTracker = Callable[[Path, Mapping[str, Parameter]], Tracker]
TRACKERS = {
    "tensorboard": "server_app.tracking.tensorboard_tracker:TensorBoardTracker",
    "trackio": "server_app.tracking.trackio_tracker:TrackioTracker",
    "wandb": "server_app.tracking.wandb_tracker:WandbTracker",
    "mlflow": "server_app.tracking.mlflow_tracker:MlflowTracker",
}
"""Class of each tool by the value of ``tracking``; its package is imported on first use."""


def open_tracker(tool: str, folder: Path, parameters: Mapping[str, Parameter]) -> Tracker:
    """Begin a run in a tool, or continue it after a resumption.

    Parameters
    ----------
    tool : value of ``tracking``
    folder : run directory; its name is the name of the run
    parameters : settings of the run by dotted key
    """
    module, _, name = TRACKERS[tool].partition(":")
    kind: OpenTracker = getattr(import_module(module), name)
    return kind(folder, parameters)
