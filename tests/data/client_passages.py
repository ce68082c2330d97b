"""Passages of one client, from which its calibration samples are cut."""

from espalier.data.client_text import split_passages
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.data import DataSettings


def run_on(data: DataSettings, num_clients: int, seed: int = 0) -> RunSettings:
    """Return the settings of a run of the default method with these data."""
    return RunSettings(data=data, num_clients=num_clients, seed=seed)


def client_passages(
    data: DataSettings, node: NodeSettings, client: int, num_clients: int, seed: int = 0
) -> list[str]:
    """Return the client's passages that are not held out."""
    return list(split_passages(run_on(data, num_clients, seed), node, client)[0])
