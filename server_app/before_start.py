"""Open everything that a simulated run reads, before anything is started; ``espalier run`` begins with it.

The ServerApp and the clients open the same with the same words. But by then a SuperLink and Ray have been started, and each
client finds the same mistake by itself. Built-in texts that models are compared on are left to the ServerApp: nobody can have
got them wrong.
"""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from espalier.corpora.hub import CANNOT_BE_LOADED
from espalier.modeling.computing import set_up
from espalier.modeling.limits import require_within_limits
from espalier.modeling.opened import OpenedModel, open_model
from espalier.pace.beats import Pace, beats_of, heard_by
from espalier.settings.mistakes import Mistake
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.storage.private import private_folder
from espalier.training.client_data import read_client_data
from server_app.model_fit import require_fit
from server_app.public_tests import public_tests
from server_app.run_directory import require_run_directory


def open_all(config: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Open model, tokenizer, the run that is resumed, public tests and every client's data as a simulation will.

    A client whose data cannot be used costs its own contribution, so it is told, and no more, as long as the quorum is left.

    Raises
    ------
    Mistake
        Something cannot be used; what clients would say is told for all of them at once.
    """
    settings = parse(config, simulation=True).with_quorum(simulation=True)
    set_up(settings, Path(settings.out_dir))
    model = open_model(settings.model)
    require_within_limits(settings, model)
    require_run_directory(settings, model)
    private_folder(simulated_node().state_root())
    # Simulated nodes state no capability.
    equals = {f"client {client}": 1.0 for client in range(settings.num_clients)}
    require_fit(
        settings, model, public_tests(settings, model, built_in=False), equals, simulation=True
    )
    unusable = _unusable(settings, model)
    lines = [f"{_clients(clients)}: {reason}" for reason, clients in unusable.items()]
    left = settings.num_clients - sum(map(len, unusable.values()))
    if left < math.ceil(round(settings.num_clients * settings.quorum, 6)):
        raise Mistake("\n".join(lines))
    for line in lines:
        tell(
            f"{line}\n  (the run goes on without; its quorum is {settings.quorum:g} of num-clients"
            f" = {settings.num_clients})"
        )


def _unusable(settings: RunSettings, model: OpenedModel) -> dict[str, list[int]]:
    """What clients would say of their data, and which of them."""
    found: dict[str, list[int]] = {}
    for client in range(settings.num_clients):
        try:
            with beats_of(f"client {client}"):
                read_client_data(settings, simulated_node(), model, client)
        except Mistake as mistake:
            found.setdefault(str(mistake), []).append(client)
            # Nor for any other; each try takes long.
            if settings.data.source == "hub" and CANNOT_BE_LOADED in str(mistake):
                return {str(mistake): list(range(settings.num_clients))}
    return found


def _clients(clients: list[int]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"


def _tell(line: str) -> None:
    print(f"espalier: {line}", file=sys.stderr, flush=True)


def main(config: Mapping[str, Any]) -> int:
    """Open what a run with this flat configuration reads; 2 if something in it cannot be used."""
    try:
        with heard_by(Pace(_tell)):
            open_all(config, _tell)
    except Mistake as mistake:
        print(f"espalier: {mistake}", file=sys.stderr)
        return 2
    return 0
