"""A new run in a ServerApp that is not Espalier's own (docs/how-to/own-server-app.md)."""

from datetime import datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from espalier.environment.hub_models import download_model, is_on_hub
from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.flower.shared_nodes import is_simulation, with_enough_nodes
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened import open_model
from espalier.identity.names import lineage_of
from espalier.messages.ledger import dense_bytes_of
from espalier.settings.run import parse
from strategies.base.method import require_fit
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder

STAMP = "%Y%m%d-%H%M%S"
"""Format of the start time in the names of the run and of its directory."""


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
    name = settings.model
    model = open_model(download_model(name) if is_on_hub(name) else name)
    computing = set_up(settings, Path(settings.out_dir))
    # Everything is checked before the directory is made and clients are asked.
    require_within_limits(settings, model)
    clients = range(settings.num_clients) if simulation else ()
    # Simulated nodes state no capability, so all have the same.
    require_fit(settings, model, {f"client {client}": 1.0 for client in clients})
    stamp = datetime.now().strftime(STAMP)
    # Two runs may start in the same second.
    run_id = str(context.run_id)
    path = at_home(settings.out_dir).absolute() / f"{stamp}-{settings.method}-{run_id}"
    try:
        folder = RunFolder(path, dense_bytes_of(model.plan))
    except OSError as error:
        raise InputError(
            f"out-dir = {settings.out_dir!r}: {path} cannot be made ({error.strerror}); name a"
            " directory that can be written"
        ) from None
    return Run(
        settings,
        model,
        folder,
        lineage_of(stamp, run_id),
        with_enough_nodes(grid, settings.num_clients),
        simulation=simulation,
        computing=computing,
    )
