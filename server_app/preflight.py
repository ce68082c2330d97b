"""Check of all inputs of a simulated run before anything is started (``espalier run``).

ServerApp and clients open the same inputs and report the same errors. But by then a SuperLink and
Ray are running, and each client finds the same error again. Built-in evaluation texts are left to
the ServerApp, because they cannot be misconfigured.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from espalier.data.client_files import require_whole_groups
from espalier.data.files.hub import CANNOT_BE_LOADED
from espalier.errors import EspalierError, InputError, tell
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.base_check import require_same_heads, require_within_limits
from espalier.hf.opening.config_only_model import opened
from espalier.hf.opening.opened_model import OpenedModel
from espalier.privacy.guarantee import require_reachable_epsilon
from espalier.progress import Throttle, progress_listener, progress_prefix
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.storage.client_state import private_folder
from espalier.training.sequences import read_client_data
from server_app.model_fit import require_fit
from server_app.public_tests import public_tests
from server_app.run_directory import require_run_directory


def open_all(config: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Open model, tokenizer, a resumed run, evaluation texts and the data of all clients.

    A client with unusable data loses only its own contribution. It is reported, and the check
    continues as long as the quorum is reached.

    Raises
    ------
    InputError
        An input cannot be used. The errors of all clients are reported together.
    """
    settings = parse(config, simulation=True).with_quorum(simulation=True)
    require_reachable_epsilon(settings)
    require_whole_groups(settings.data, settings.num_clients)
    set_up(settings, Path(settings.out_dir))
    with opened(settings.model) as model:
        _open_with(settings, model, tell)


def _open_with(settings: RunSettings, model: OpenedModel, tell: Callable[[str], None]) -> None:
    require_within_limits(settings, model)
    require_same_heads(model)
    # Also checks a resumed run's settings and checkpoint.
    require_run_directory(settings, model)
    private_folder(simulated_node().state_root())
    # Simulated nodes state no capability, so all have the same.
    equals = {f"client {client}": 1.0 for client in range(settings.num_clients)}
    require_fit(
        settings, model, public_tests(settings, model, built_in=False), equals, simulation=True
    )
    unusable = _unusable(settings, model)
    lines = [
        f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}: {reason}"
        for reason, clients in unusable.items()
    ]
    left = settings.num_clients - sum(map(len, unusable.values()))
    # The same rounding as in ``Rounds.quorum_of``.
    if left < math.ceil(round(settings.num_clients * settings.quorum, 6)):
        raise InputError("\n".join(lines))
    for line in lines:
        tell(
            f"{line}\n  (the run continues without these clients; its quorum is"
            f" {100 * settings.quorum:g}% of num-clients = {settings.num_clients})"
        )


def _unusable(settings: RunSettings, model: OpenedModel) -> dict[str, list[int]]:
    """Return the errors of unusable client data, with the clients that have each error."""
    clients_by_error: dict[str, list[int]] = {}
    for client in range(settings.num_clients):
        try:
            with progress_prefix(f"client {client}"):
                read_client_data(settings, simulated_node(), model, client)
        except EspalierError as error:
            clients_by_error.setdefault(str(error), []).append(client)
            # The data set then cannot be loaded for any other client, and each attempt takes long.
            if settings.data.origin == "hub" and CANNOT_BE_LOADED in str(error):
                return {str(error): list(range(settings.num_clients))}
    return clients_by_error


def _tell_of(where: str, line: str) -> None:
    tell(f"{where}{line}")


def main(document: Mapping[str, Any]) -> int:
    """Open all inputs of a run, or of the cells of a sweep.

    Parameters
    ----------
    document : flat configuration; or ``cells``, flat configurations by name

    Returns
    -------
    int
        0, or 2 if an input cannot be used; all cells are opened.
    """
    code = 0
    cells: Mapping[str, Mapping[str, Any]] = document.get("cells", {"": document})
    for name, config in cells.items():
        where = f"cell {name}: " if name else ""
        try:
            with progress_listener(Throttle(tell)):
                open_all(config, partial(_tell_of, where))
        except EspalierError as error:
            _tell_of(where, str(error))
            code = 2
    return code
