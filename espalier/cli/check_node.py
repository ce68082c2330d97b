"""``espalier check-node``: check a node's configuration, data, memory and disk for a run."""

from collections.abc import Sequence
from pathlib import Path

from espalier.flower.node_config import read_node_config
from espalier.launch.app_process import run_in_app
from espalier.launch.configuration import configuration

CHECK_NODE = "client_app.node.check_node"
"""Module of the app that checks what a node would read."""
NODE_FIT = "server_app.estimate.node_fit"
"""Module that estimates memory and disk.

It is separate from ``CHECK_NODE``, because estimates belong to the server's packages.
"""


def check_node(app: Path, node_config: str, words: Sequence[str]) -> int:
    """Check a node configuration for the run that the words describe.

    Returns
    -------
    Exit code: 0 if the node can take part, 2 if it would refuse.

    Raises
    ------
    InputError
        Flower cannot read the node configuration, or the run's settings are wrong.
    """
    run, _ = configuration(app, words, on_this_machine=False)
    document = {"node": read_node_config(node_config), "run": run}
    return run_in_app(app, CHECK_NODE, document) or run_in_app(app, NODE_FIT, document)
