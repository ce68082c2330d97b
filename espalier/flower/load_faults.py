"""Detection of nodes that could not load the run's program.

Flower installs a run's bundle file by file into a directory named by the bundle's hash, and takes
an existing directory for complete. Two runs that begin at the same time may therefore find half a
program. After an interrupted installation half a program remains until somebody removes the
directory.
"""

import re
from pathlib import Path

from flwr.app import Message
from flwr.common.constant import ErrorCode

from espalier.errors import NOT_LOADED

FAULTS = re.compile(
    r"^<class '(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|FileNotFoundError)'>"
)
"""Pattern of Flower's error for a ClientApp that fails at import; our handlers never raise."""
TRIES = 3
"""Attempts for a node that could not load the program, which another run may be installing."""


def could_not_load(reply: Message) -> bool:
    """Return whether Flower's reply reports that the node could not load the ClientApp."""
    if reply.has_content():
        return False
    raised = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION or (
        raised and bool(FAULTS.match(reply.error.reason or ""))
    )


def load_remedy() -> str:
    """Return the error text with the directory to remove at such a node.

    The node's copy is in a directory with the same name as the server's.
    """
    name = Path(__file__).parent.parent.parent.name
    folder = name if name.startswith("espalier.espalier.") else "espalier.espalier.*"
    return (
        f"{NOT_LOADED}: its copy may be incomplete, or a library may be missing there (see the"
        f" node's log); stop the node's runs, remove apps/{folder} in its FLWR_HOME (default"
        " ~/.flwr), and start again"
    )
