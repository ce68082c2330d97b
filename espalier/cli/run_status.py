"""``espalier status``: print the state of the runs in some directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.launch.app_process import run_in_app

STATUS = "server_app.run_status"
"""Module of the app that reads run directories."""


def add_status(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "status", help="show whether runs are running, interrupted, failed or completed"
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="RUN-DIRECTORY",
        help="run directory, as printed by the run",
    )


def show_status(app: Path, directories: Sequence[str]) -> int:
    """Print a line per run directory; return 2 if a directory is no run directory."""
    return run_in_app(app, STATUS, list(directories))
