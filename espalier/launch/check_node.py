"""``espalier check-node``: read the words, let the app's client look at the node, and the plan at its memory and disk."""

from collections.abc import Sequence
from pathlib import Path

from espalier.flower.node_config import read_node_config
from espalier.launch.configuration import configuration
from espalier.launch.in_app import run_in_app

CHECK_NODE = "client_app.check_node"
"""The module of the app that goes through what a node would read."""
NODE_FIT = "server_app.planning.node_fit"
"""The module that says what memory and disk the work takes there; planning is the server's, so it is no part of the former."""


def check_node(app: Path, node_config: str, words: Sequence[str]) -> int:
    """Check a node configuration for the run that the words describe; 0 if the node can take part, 2 if it would refuse.

    Raises
    ------
    Mistake
        The node configuration is not what Flower reads, or the run's settings are wrong.
    """
    run, _ = configuration(app, words, on_this_machine=False)
    document = {"node": read_node_config(node_config), "run": run}
    return run_in_app(app, CHECK_NODE, document) or run_in_app(app, NODE_FIT, document)
