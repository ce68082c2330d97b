"""A new run in a ServerApp that is not Espalier's own (docs/own-server-app.md)."""

from datetime import datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from espalier.environment.hub_models import download_model, is_on_hub
from espalier.flower.shared_nodes import is_simulation, with_enough_nodes
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened import open_model
from espalier.identity.names import lineage_of
from espalier.settings.run import parse
from strategies.base.method import require_fit
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder

STAMP = "%Y%m%d-%H%M%S"
"""Format of the start time in the name of the run at its clients."""


def new_run(grid: Grid, context: Context, folder: Path) -> Run:
    """Return a run with the settings of the app's run configuration, ready for a strategy.

    A strategy is made of the run and a ``ClientEvaluation``, and ``Federation(strategy).start()``
    carries it out. The run cannot be resumed, and its end is not recorded: that is left to the
    ServerApp, as are the export and the evaluation of the result.

    Parameters
    ----------
    grid : grid of the ServerApp, in a simulation or a deployment
    context : context of the ServerApp; keys that its run configuration lacks have their default
    folder : directory of the run, which is created; it must not have been used by another run

    Raises
    ------
    InputError
        The settings are wrong, or the model cannot be used with them. Nothing was started.
    """
    simulation = is_simulation(grid)
    settings = parse(context.run_config, simulation=simulation).with_quorum(simulation=simulation)
    name = settings.model
    model = open_model(download_model(name) if is_on_hub(name) else name)
    computing = set_up(settings, folder)
    require_within_limits(settings, model)
    clients = range(settings.num_clients) if simulation else ()
    # Simulated nodes state no capability, so all have the same.
    require_fit(settings, model, {f"client {client}": 1.0 for client in clients})
    return Run(
        settings,
        model,
        RunFolder(folder.absolute()),
        lineage_of(datetime.now().strftime(STAMP), str(context.run_id)),
        with_enough_nodes(grid, settings.num_clients),
        simulation=simulation,
        computing=computing,
    )
