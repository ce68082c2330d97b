"""Recognition of nodes that could not load the run's program.

Flower installs a run's bundle into a directory named by the bundle's hash, file by file, and whoever finds that directory takes
it for complete. Two runs that begin at the same time may so meet half a program; and half a program stays where an installation
was interrupted, until somebody removes the directory.
"""

import re
from pathlib import Path

from flwr.app import Message
from flwr.common.constant import ErrorCode

from espalier.settings.mistakes import NOT_LOADED

FAULTS = re.compile(
    r"^<class '(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|FileNotFoundError)'>"
)
"""Beginning of Flower's error for a ClientApp that fails at import; our handlers raise nothing."""
TRIES = 3
"""Attempts for a node that could not load the program: another run may be installing it."""


def could_not_load(reply: Message) -> bool:
    """Return whether Flower says in place of an answer that the node's ClientApp was not loaded."""
    if reply.has_content():
        return False
    raised = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION or (
        raised and bool(FAULTS.match(reply.error.reason or ""))
    )


def load_remedy() -> str:
    """Say what to remove at such a node; its copy lies in a directory of the same name as the server's."""
    name = Path(__file__).parent.parent.parent.name
    folder = name if name.startswith("espalier.espalier.") else "espalier.espalier.*"
    return (
        f"{NOT_LOADED}: its copy may be incomplete, or a library may be missing there, as its log"
        f" says; stop the node's runs, remove apps/{folder} in its FLWR_HOME (~/.flwr where none is"
        " set), and begin again"
    )
