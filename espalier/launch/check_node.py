"""``espalier check-node``: read the words, let the app's client look at the node, and the plan at its memory and disk."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.launch.configuration import configuration
from espalier.launch.in_app import run_in_app
from espalier.settings.mistakes import Mistake

CHECK_NODE = "client_app.check_node"
"""The module of the app that goes through what a node would read."""
NODE_FIT = "server_app.planning.node_fit"
"""The module that says what memory and disk the work takes there; planning is the server's, so it is no part of the former."""

PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")
"""What Flower takes for a key and its value; it passes over everything else without a word."""


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


def read_node_config(text: str) -> dict[str, Any]:
    """Keys and values of ``flower-supernode --node-config``, read as Flower reads them: pairs, or the name of a TOML file.

    Raises
    ------
    Mistake
        Flower could not read it, or would pass over a part of it.
    """
    from flwr.common.config import parse_config_args

    if not text.endswith(".toml") and (rest := PAIR.sub("", text).strip()):
        raise Mistake(f"node-config: {rest!r} is no key=value, and Flower would pass over it; write key=value, without blanks")
    try:
        return dict(parse_config_args([text]))
    except OSError as error:
        raise Mistake(
            f"node-config: {text}: cannot be read ({error.strerror}); name a TOML file, or give key=value pairs"
        ) from None
    except Exception:  # of the library that Flower reads it with
        raise Mistake(
            f"node-config: {text!r}: Flower cannot read it; a value is a number, true, false or a string in its own quotes, "
            "for instance 'site=\"hospital-a\" windows=16'"
        ) from None
