"""Runs that failed because Flower had installed their program only in part, and a bundle that is installed elsewhere.

Flower installs a bundle into ``apps/<publisher>.<name>.<version>.<hash>`` of the machine's ``FLWR_HOME``, file by file, and
takes a directory that is there for complete. So of two runs that are submitted at the same time one may find half a program,
and so does every later run where an installation was interrupted. The command that submits has no access to other machines'
directories; but a bundle with another hash is installed anew, on the SuperLink's machine and on all nodes.
"""

import re
import secrets
import shutil
import tomllib
from pathlib import Path

from espalier.settings.mistakes import NOT_LOADED

FOLDER = re.compile(r"/[^\"'\n]*/apps/espalier\.espalier\.[0-9.]+\.[0-9a-f]{8}\b")
"""Path of a bundle that Flower has installed."""
ROOM = "(client_app|server_app|strategies|espalier|pruning_kernels)"
FAULTS = re.compile(
    rf"{re.escape(NOT_LOADED)}|Unable to load (module|attribute) |Cannot find pyproject\.toml in"
    rf" {FOLDER.pattern}"
    rf"|No module named '{ROOM}\b|^ImportError: cannot import name .*'{ROOM}\b|^AttributeError:"
    rf" module '{ROOM}\b"
    r"|^(SyntaxError|IndentationError): ",
    re.MULTILINE,
)
"""Lines in the log of a run whose program was installed only in part."""


def is_incomplete(log: str) -> bool:
    """Return whether a failed run's log says that its program could not be loaded, on the server or at a node."""
    return FAULTS.search(log) is not None


def where_to_mend(log: str) -> str:
    """The directory that is to be removed for other runs of the same bundle."""
    found = FOLDER.search(log)
    return (
        found[0]
        if found
        else "apps/espalier.espalier.* in the FLWR_HOME (~/.flwr) of the SuperLink, or of the node"
    )


def unshared_app(app: Path, folder: Path) -> Path:
    """Copy the app into a directory below ``folder``, so that Flower makes a bundle of it that is like no other.

    Returns
    -------
    The copy's directory. Its program is the same; only a table of pyproject.toml that nothing reads is new.
    """
    copy = folder / f"app-{secrets.token_hex(4)}"
    project = (app / "pyproject.toml").read_text(encoding="utf-8")
    for pattern in tomllib.loads(project)["tool"]["flwr"]["app"]["fab-include"]:
        for file in app.glob(pattern):
            target = copy / file.relative_to(app)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    (copy / "pyproject.toml").write_text(
        f'{project}\n[tool.espalier]\nbundle = "{secrets.token_hex(16)}"\n', encoding="utf-8"
    )
    return copy
