"""``espalier plan``: estimate what a run would take, from the same words as ``espalier run``."""

import argparse

from espalier.cli.arguments import add_app, add_words
from espalier.errors import InputError
from espalier.launch.app import find_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration

PLAN = "server_app.estimate.command"
"""Module of the app that makes the estimate."""
MIN_SPEED = 1e-6
MAX_SPEED = 1e9


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan", help="estimate the bytes, memory, disk space and time of a run; needs no weights"
    )
    add_words(parser, "the run, as for espalier run; default: the demo")
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
    add_app(parser)
    parser.set_defaults(execute=plan)


def plan(given: argparse.Namespace) -> int:
    """Print the estimate; return 0, or 2 if the run's settings or its model are wrong.

    Raises
    ------
    InputError
        A word is not a setting, or a speed is invalid.
    """
    take_interrupts()
    app = find_app(given.app)
    speeds = {"teraflops": given.teraflops, "megabits": given.megabits}
    for name, value in speeds.items():
        if value is not None and not MIN_SPEED <= value <= MAX_SPEED:
            raise InputError(f"--{name} {value:g}: must be from {MIN_SPEED:g} to {MAX_SPEED:g}")
    if given.measure and given.teraflops is not None:
        raise InputError(
            f"--teraflops {given.teraflops:g} --measure: give the speed or measure it, not both"
        )
    run, _ = configuration(app, given.words, on_this_machine=True, works=False)
    return run_in_app(app, PLAN, {"run": run, **speeds, "measure": given.measure})
