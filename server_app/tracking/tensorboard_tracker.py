"""TensorBoard: event files in ``tensorboard/`` of the run directory."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from server_app.tracking.tracker import Parameter

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Event files of one run; a resumed run adds another file."""

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = dict(parameters)
        self._writer = SummaryWriter(str(folder / FOLDER))
        rows = [f"| `{key}` | {value} |" for key, value in parameters.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]))
        self._writer.flush()

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after a round."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        """Record the final figures, with the settings as hyperparameters of the HParams page."""
        if completed:
            # This writes the figures as scalars too.
            self._writer.add_hparams(
                self._parameters, dict(figures), run_name=".", global_step=step
            )
        else:
            self.log(figures, step)
        self._writer.close()
