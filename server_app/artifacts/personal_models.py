"""Personal models, one per client.

A simulation collects them in the run directory; in a deployment each stays at its site.
"""

import shutil
from typing import TypeVar

from espalier.hf.stream.edits import dense
from espalier.models.adapters import head_plan
from espalier.settings.node import NodeSettings
from espalier.storage.client_state import PrivateState
from server_app.artifacts.outcome import Outcome
from server_app.artifacts.task_scores import measure_items
from strategies.base.method import RunResult
from strategies.base.roster import Roster
from strategies.base.run import Run

FOLDER = "clients"

R = TypeVar("R", bound=RunResult)


class PersonalOutcome(Outcome[R]):
    """Result from which each client makes its own model.

    The server evaluates the dense model, clients evaluate their own ones.
    """

    def measure(self, result: R) -> None:
        """Evaluate the dense model; clients evaluate their own."""
        if self.tests.texts:
            self.measure_texts({"dense": dense})
        if self.tests.encoded is not None:
            # Encoders need a classification head; this is the initial one that all clients begin
            # with.
            head = head_plan(self.run.model.plan, self.tests.num_classes)
            measure_items(
                self.run, head, {"dense": {}}, self.tests, self.summary, self.note_not_finite
            )

    def take_clients_figures(self) -> None:
        """Assign the clients' evaluation to the federated result: each has its own model of it."""
        self.summary.take_personal_figures()
        if self.run.simulation:
            collect_models(self.run, self.summary.roster)


def where_models_are(run: Run, *, kept: bool) -> str:
    """Return a sentence that names the location of the clients' models."""
    if not kept:
        return "the clients' own models were not stored"
    if run.simulation:
        return f"each client's model is in {run.folder.path / FOLDER}"
    return "each client's model is at the client, if its owner set models-dir"


def collect_models(run: Run, roster: Roster) -> None:
    """Move the models of simulated clients, which are on this machine, to the run directory.

    Each client has its own folder.
    """
    root = NodeSettings().state_root()
    folder = run.folder.path / FOLDER
    for seat in roster.seats.values():
        written = PrivateState(root, run.lineage, seat.site, {}).own_model
        if written.is_dir():
            folder.mkdir(exist_ok=True)
            shutil.move(written, folder / seat.site)
