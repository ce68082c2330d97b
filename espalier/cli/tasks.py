"""``espalier tasks``: print what the records of each task need, its prompt and its scores."""

import argparse

from espalier.launch.app import installed_app, run_in_app

DESCRIPTION = "espalier.data.tasks.description"
"""Module of the app that describes tasks."""


def add_tasks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tasks", help="show the fields, the prompt and the scores of each task"
    )
    parser.add_argument("names", nargs="*", metavar="TASK", help="task; none: all tasks")
    parser.set_defaults(execute=show_tasks)


def show_tasks(given: argparse.Namespace) -> int:
    """Print the tasks; return a code other than 0 if one is unknown."""
    return run_in_app(installed_app(), DESCRIPTION, given.names)
