"""Models that are each client's own: a simulation brings them together, in a deployment each is at its site."""

import shutil

from espalier.settings.node import NodeSettings
from espalier.storage.private import PrivateState
from strategies.engine.roster import Roster
from strategies.engine.run import Run

FOLDER = "clients"


def where_models_are(run: Run, *, kept: bool) -> str:
    """In words."""
    if not kept:
        return "clients' own models were not kept"
    if run.simulation:
        return f"each client's model is in {run.folder.path / FOLDER}"
    return "each client's model is at the client, if its owner gave it a models-dir"


def collect_models(run: Run, roster: Roster) -> None:
    """Simulated clients are on this machine: bring the models that they wrote into the run directory, a folder for each."""
    root, folder = NodeSettings().state_root(), run.folder.path / FOLDER
    for seat in roster.seats.values():
        written = PrivateState(root, run.lineage, seat.site, {}).own_model
        if written.is_dir():
            folder.mkdir(exist_ok=True)
            shutil.move(written, folder / seat.site)
