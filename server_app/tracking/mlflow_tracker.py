"""MLflow: ``mlflow.db`` of the output directory unless ``MLFLOW_TRACKING_URI`` is set."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.tracking.tracker import PROJECT, Parameter

VARIABLE = "MLFLOW_TRACKING_URI"
DATABASE = "mlflow.db"
ARTIFACTS = "mlflow-artifacts"
TAG = "espalier.run"
"""Tag with the name of the run directory, by which a resumed run is found."""
BATCH = 100
"""Maximum number of parameters of a request."""


class MlflowTracker:
    """Run in an MLflow store."""

    def __init__(self, folder: Path, parameters: Mapping[str, Parameter]) -> None:
        # MLflow reports its use to its makers otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        place = os.environ.get(VARIABLE, f"sqlite:///{folder.parent / DATABASE}")
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=place)
        experiment = self._experiment((folder.parent / ARTIFACTS).as_uri())
        # A resumed run continues the same entry.
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{folder.name}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        created = self._client.create_run(experiment, run_name=folder.name, tags={TAG: folder.name})
        self._id = created.info.run_id
        # The store limits the size of a request.
        for few in _batches([Param(key, str(value)) for key, value in parameters.items()]):
            self._client.log_batch(self._id, params=few)

    def _experiment(self, artifacts: str) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(PROJECT)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(PROJECT, artifact_location=artifacts))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after a round."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        for few in _batches(metrics):
            self._client.log_batch(self._id, metrics=few)

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        """Record the final figures and close the run."""
        self.log(figures, step)
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


def _batches(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), BATCH):
        yield entries[start : start + BATCH]
