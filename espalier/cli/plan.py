"""``espalier plan``: estimate what a run would take, from the same words as ``espalier run``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.errors import InputError
from espalier.launch.app_process import run_in_app
from espalier.launch.configuration import configuration

PLAN = "server_app.estimate.command"
"""Module of the app that makes the estimate."""
LEAST_SPEED = 1e-6
MOST_SPEED = 1e9


def add_plan(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="estimate the bytes, memory, disk space and time of a run; needs no weights"
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="preset | key=value",
        help="the run, as for espalier run; default: the demo",
    )
    parser.add_argument(
        "--teraflops",
        type=float,
        help="speed of a client, in 10^12 floating-point operations per second",
    )
    parser.add_argument(
        "--megabits", type=float, help="bandwidth of a client, in 10^6 bits per second"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the speed of this machine instead of --teraflops",
    )
    return parser


def plan(
    app: Path,
    words: Sequence[str],
    teraflops: float | None,
    megabits: float | None,
    *,
    measure: bool,
) -> int:
    """Print the estimate; return 0, or 2 if the run's settings or its model are wrong.

    Raises
    ------
    InputError
        A word is no setting, or a speed is invalid.
    """
    for name, value in (("--teraflops", teraflops), ("--megabits", megabits)):
        if value is not None and not LEAST_SPEED <= value <= MOST_SPEED:
            raise InputError(f"{name} {value:g}: must be from {LEAST_SPEED:g} to {MOST_SPEED:g}")
    if measure and teraflops is not None:
        raise InputError(
            f"--teraflops {teraflops:g} --measure: give the speed or measure it, not both"
        )
    run, _ = configuration(app, words, on_this_machine=True, works=False)
    return run_in_app(
        app, PLAN, {"run": run, "teraflops": teraflops, "megabits": megabits, "measure": measure}
    )
