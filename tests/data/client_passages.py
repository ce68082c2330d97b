"""Passages of one client, from which its calibration samples are cut."""

from espalier.data.client_text import split_passages
from espalier.settings.node import NodeSettings
from espalier.settings.tables.data import DataSettings


def client_passages(
    data: DataSettings, node: NodeSettings, client: int, num_clients: int, seed: int = 0
) -> list[str]:
    """Return the client's passages that are not held out."""
    return list(split_passages(data, node, client, num_clients, seed)[0])
