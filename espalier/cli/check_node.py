"""``espalier check-node``: check a node's configuration, data, memory and disk for a run."""

import argparse
import sys

from espalier.cli.arguments import add_app, add_root_certificates, add_words
from espalier.flower.control_api import warn_of_answering_control_api
from espalier.flower.node_config import read_node_config
from espalier.launch.addresses import require_address
from espalier.launch.app import find_app, installed_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration

CHECK_NODE = "client_app.node.check_node"
"""Module of the app that checks what a node would read."""
NODE_FIT = "server_app.estimate.node_fit"
"""Module that estimates memory and disk.

It is separate from ``CHECK_NODE``, because estimates belong to the server's packages.
"""


def add_check_node(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check-node", help="check a SuperNode's --node-config on its machine, for a given run"
    )
    parser.add_argument(
        "node_config",
        metavar="NODE-CONFIG",
        help="the text of flower-supernode --node-config, in quotes",
    )
    add_words(parser, "the run, as for espalier run; default: the demo")
    add_app(parser)
    parser.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="address to which the node connects; warn if runs can be started there",
    )
    add_root_certificates(parser)
    parser.set_defaults(execute=check_node)


def check_node(given: argparse.Namespace) -> int:
    """Check a node configuration for the run that the words describe.

    Returns
    -------
    Exit code: 0 if the node can take part, 2 if it would refuse.

    Raises
    ------
    InputError
        Flower cannot read the node configuration, or the run's settings are wrong.
    """
    take_interrupts()
    try:
        if given.superlink is not None:
            require_address(given.superlink)
            warn_of_answering_control_api(given.superlink, given.root_certificates)
        # By default the installed app: it is the program that the node would run.
        app = find_app(given.app) if given.app else installed_app()
        run, _ = configuration(app, given.words, on_this_machine=False)
        document = {"node": read_node_config(given.node_config), "run": run}
        return run_in_app(app, CHECK_NODE, document) or run_in_app(app, NODE_FIT, document)
    except KeyboardInterrupt:
        print("\nespalier: interrupted; the check of the node is incomplete", file=sys.stderr)
        return 130
