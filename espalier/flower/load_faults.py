"""Programs that a node could not load, or that Flower installed only in part, and their repair.

Flower installs a bundle into ``apps/<publisher>.<name>.<version>.<hash>`` in the machine's
``FLWR_HOME``, file by file, and takes an existing directory for complete. If two runs are submitted
at the same time, one may find half a program. So does every later run after an interrupted
installation. The submitting command cannot access the directories of other machines. But a bundle
with another hash is installed again, on the SuperLink's machine and on all nodes.
"""

import re
import secrets
import shutil
import tomllib
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

FOLDER = re.compile(r"/[^\"'\n]*/apps/espalier\.espalier\.[0-9.]+\.[0-9a-f]{8}\b")
"""Pattern of the path of an installed bundle."""
ROOM = "(client_app|server_app|strategies|espalier|pruning_kernels)"
BUNDLE_FAULTS = re.compile(
    rf"{re.escape(NOT_LOADED)}|Unable to load (module|attribute) |Cannot find pyproject\.toml in"
    rf" {FOLDER.pattern}"
    rf"|No module named '{ROOM}\b|^ImportError: cannot import name .*'{ROOM}\b|^AttributeError:"
    rf" module '{ROOM}\b"
    r"|^(SyntaxError|IndentationError|tomli\._parser\.TOMLDecodeError): "
    r"|^ValueError: Invalid pyproject\.toml:",
    re.MULTILINE,
)
"""Pattern of log lines of a run whose program was installed only in part."""


def could_not_load(reply: Message) -> bool:
    """Return whether Flower's reply reports that the node could not load the ClientApp."""
    if reply.has_content():
        return False
    # A handler that fails returns a reply; only loading raises in Flower's process.
    raised = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return reply.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION or (
        raised and bool(FAULTS.match(reply.error.reason or ""))
    )


def load_remedy() -> str:
    """Return the error text with the directory to remove at such a node.

    The node's copy is in a directory with the same name as the server's.
    """
    # Flower installs a bundle under its name and hash, on each machine.
    name = Path(__file__).parent.parent.parent.name
    folder = name if name.startswith("espalier.espalier.") else "espalier.espalier.*"
    return (
        f"{NOT_LOADED}: its copy may be incomplete, or a library may be missing there (see the"
        f" node's log); stop the node's runs, remove apps/{folder} in its FLWR_HOME (default"
        " ~/.flwr), and start again"
    )


def is_incomplete(log: str) -> bool:
    """Return whether the log of a failed run shows that server or node could not load it."""
    return BUNDLE_FAULTS.search(log) is not None


def where_to_mend(log: str) -> str:
    """Return the directory to remove, so that other runs can use the same bundle."""
    match = FOLDER.search(log)
    return (
        match[0]
        if match
        else "apps/espalier.espalier.* in the FLWR_HOME (~/.flwr) of the SuperLink, or of the node"
    )


def unshared_app(app: Path, folder: Path) -> Path:
    """Copy the app into a directory below ``folder``, so that its bundle gets a unique hash.

    The program of the copy is the same. Only a table in pyproject.toml is added, which no program
    reads.
    """
    copy = folder / f"app-{secrets.token_hex(4)}"
    project = (app / "pyproject.toml").read_text(encoding="utf-8")
    # Exactly the files that Flower puts into a bundle.
    for pattern in tomllib.loads(project)["tool"]["flwr"]["app"]["fab-include"]:
        for file in app.glob(pattern):
            target = copy / file.relative_to(app)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    # A table that changes the hash and nothing else.
    (copy / "pyproject.toml").write_text(
        f'{project}\n[tool.espalier]\nbundle = "{secrets.token_hex(16)}"\n', encoding="utf-8"
    )
    return copy
