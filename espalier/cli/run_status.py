"""``espalier status``: print the state of the runs in some directories."""

import argparse

from espalier.launch.app import installed_app, run_in_app

STATUS = "server_app.run_directory"
"""Module of the app that reads run directories."""


def add_status(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    parser.set_defaults(execute=show_status)


def show_status(given: argparse.Namespace) -> int:
    """Print a line per run directory; return 2 if a directory is not a run directory."""
    return run_in_app(installed_app(), STATUS, given.directories)
