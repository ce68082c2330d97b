"""Trackio: an SQLite database in ``trackio/`` of the output directory."""

import os
from collections.abc import Mapping
from pathlib import Path

from server_app.tracking.tracker import PROJECT, Parameter

FOLDER = "trackio"


class TrackioTracker:
    """Run in Trackio's local database; ``TRACKIO_DIR`` names another place."""

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter]) -> None:
        # Trackio reads the variable when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(folder.parent / FOLDER))
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=folder.name,
            config=dict(parameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after a round."""
        self._run.log(dict(figures), step=step)

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        """Record the final figures and wait until they are written."""
        self.log(figures, step)
        self._run.finish()
