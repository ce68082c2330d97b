"""A new run in a ServerApp that is not Espalier's own (docs/how-to/own-server-app.md)."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from espalier.flower.shared_nodes import is_simulation, with_enough_nodes
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from strategies.base.method import require_fit
from strategies.base.model_of_hub import with_downloaded_model
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder


def new_run(grid: Grid, context: Context) -> Run:
    """Return a run with the settings of the app's run configuration, ready for a strategy.

    A strategy is made of the run and a ``ClientEvaluation``, and ``Federation(strategy).start()``
    carries it out. The run cannot be resumed, and its end is not recorded: that is left to the
    ServerApp, as are the export and the evaluation of the result.

    Parameters
    ----------
    grid : grid of the ServerApp, in a simulation or a deployment
    context : context of the ServerApp; keys that its run configuration lacks have their default

    Returns
    -------
    Run whose new directory is in ``out-dir``.

    Raises
    ------
    InputError
        The settings are wrong, the model cannot be used with them, or the directory cannot be made.
        Nothing was started.
    """
    # ``parse`` needs to know which keys apply.
    simulation = is_simulation(grid)
    settings = parse(context.run_config, simulation=simulation).with_quorum(simulation=simulation)
    settings = with_downloaded_model(settings)
    model = open_model(settings.model)
    computing = set_up(settings, Path(settings.out_dir))
    # Everything is checked before the directory is made and clients are asked.
    require_within_limits(settings, model)
    clients = range(settings.num_clients) if simulation else ()
    # Simulated nodes state no capability, so all have the same.
    require_fit(settings, model, {f"client {client}": 1.0 for client in clients})
    folder, lineage = RunFolder.of_new_run(settings, model, str(context.run_id))
    return Run(
        settings,
        model,
        folder,
        lineage,
        with_enough_nodes(grid, settings.num_clients),
        simulation=simulation,
        computing=computing,
    )
