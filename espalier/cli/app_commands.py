"""Commands that call a module of the app: ``plan``, ``check-node``, ``report``, ``approve`` ...

Each command has a function that adds it to the parser, and one that executes it and returns the
exit code.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.cli import Commands
from espalier.errors import EspalierError, InputError
from espalier.flower.programs import read_node_config
from espalier.launch.addresses import require_address, warn_of_answering_control_api
from espalier.launch.app import calls, find_app, installed_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration
from espalier.launch.presets import preset_files, read_preset

MIN_SPEED = 1e-6
MAX_SPEED = 1e9


def add_words(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the words that describe a run, with this help text, and ``--app``."""
    words = parser.add_argument("words", nargs="*", metavar="preset | key=value", help=text)
    # argcomplete calls this function.
    words.completer = complete_words  # type: ignore[attr-defined]
    parser.add_argument(
        "--app",
        help="a checkout of Espalier; default: this directory if it is one, else the installed app",
    )
    parser.set_defaults(takes_settings=True)


def complete_words(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the presets and ``key=`` words, or the values of the key that ``prefix`` names.

    After a preset or ``method=`` they are those that the method reads. A shell asks for them after
    ``eval "$(register-python-argcomplete espalier)"``.
    """
    # Only a shell that asks for completions needs the settings.
    from espalier.settings.keys import choices, choices_of_method

    words = getattr(parsed_args, "words", None) or []
    try:
        app = find_app(parsed_args.app)
        presets = list(preset_files(app))
        method = _method_of(words, app)
    except EspalierError:
        presets, method = [], ""
    keys = choices_of_method(method) if method else choices()
    name, equals, _value = prefix.partition("=")
    if equals:
        values = keys.get(name, ())
        # ``json.dumps`` writes ``true`` and ``false`` as TOML does.
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return [f"{name}={text}" for text in texts]
    has_preset = any("=" not in word for word in words)
    return [*([] if has_preset else presets), *(f"{key}=" for key in keys)]


def _method_of(words: Sequence[str], app: Path) -> str:
    """Return the method that words of a run choose; empty if they choose none."""
    from espalier.settings.registry import METHODS

    named = [word.removeprefix("method=") for word in words if word.startswith("method=")]
    presets = [read_preset(app, word).get("method", "") for word in words if "=" not in word]
    method = ["", *presets, *named][-1]
    return method if method in METHODS else ""


def add_app_commands(commands: Commands) -> None:
    """Add the commands of this module to the parser."""
    app = commands.add_parser(
        "app",
        help="print the folder of the Flower app, with its packages, presets and pyproject.toml",
    )
    app.set_defaults(execute=_show_app)
    _add_check_node(commands)
    _add_plan(commands)
    _add_report(commands)
    tasks = commands.add_parser(
        "tasks", help="show the fields, the prompt and the scores of each task"
    )
    tasks.add_argument("names", nargs="*", metavar="TASK", help="task; none: all tasks")
    tasks.set_defaults(execute=_show_tasks)
    _add_approve(commands)
    check_log = commands.add_parser("check-log", help="verify the log of what left a site")
    check_log.add_argument(
        "where", metavar="FILE | STATE-DIR", help="a log, or a state-dir with logs in egress/"
    )
    check_log.add_argument(
        "--head",
        action="append",
        dest="heads",
        default=[],
        metavar="HASH",
        help="a hash that was noted earlier and must be in the log",
    )
    check_log.set_defaults(execute=calls("client_app.policy.egress_log", "where", "heads"))


def _show_app(_: argparse.Namespace) -> int:
    """Print the folder of the app, for ``flwr run "$(espalier app)"``, and for presets to copy."""
    print(find_app(None))
    return 0


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="write a page on a run, with figures, as one HTML file (report.html)"
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="RUN-DIRECTORY",
        help="run directory, as printed by the run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write for a single run; default: report.html in the run directory",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure memory and tokens per second of the base model and the result first",
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="base model to measure, if it is no longer where the run found it",
    )
    parser.set_defaults(execute=_report)


def _report(args: argparse.Namespace) -> int:
    take_interrupts()
    return calls("espalier.results.report.command", "directories", "out", "measure", "base")(args)


def _show_tasks(args: argparse.Namespace) -> int:
    return run_in_app(installed_app(), "espalier.data.tasks.description", args.names)


def _add_approve(commands: Commands) -> None:
    parser = commands.add_parser(
        "approve",
        help="list replies that wait for approval (require-approval), and approve or refuse them",
    )
    parser.add_argument("state_dir", metavar="STATE-DIR", help="the node's state-dir")
    parser.add_argument(
        "ids", nargs="*", default=[], metavar="ID", help="beginning of the id of a reply to approve"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="approve all replies that wait now, except those that are refused",
    )
    parser.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="ID",
        help="id of a reply that must not leave",
    )
    parser.add_argument(
        "--reason",
        default="",
        metavar="TEXT",
        help="reason for a refusal; it is written to the site's log",
    )
    parser.add_argument(
        "--show",
        action="append",
        default=[],
        metavar="ID",
        help="show the content of a reply, and its files",
    )
    options = ("state_dir", "ids", "all", "refuse", "reason", "show")
    parser.set_defaults(execute=calls("client_app.policy.approval_command", *options))


def _add_plan(commands: Commands) -> None:
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
    parser.set_defaults(execute=_plan)


def _plan(args: argparse.Namespace) -> int:
    take_interrupts()
    app = find_app(args.app)
    speeds = {"teraflops": args.teraflops, "megabits": args.megabits}
    for name, value in speeds.items():
        if value is not None and not MIN_SPEED <= value <= MAX_SPEED:
            raise InputError(f"--{name} {value:g}: must be from {MIN_SPEED:g} to {MAX_SPEED:g}")
    if args.measure and args.teraflops is not None:
        raise InputError(
            f"--teraflops {args.teraflops:g} --measure: give the speed or measure it, not both"
        )
    run, _ = configuration(app, args.words, on_this_machine=True, works=False)
    document = {"run": run, **speeds, "measure": args.measure}
    return run_in_app(app, "server_app.estimate.command", document)


def _add_check_node(commands: Commands) -> None:
    parser = commands.add_parser(
        "check-node", help="check a SuperNode's --node-config on its machine, for a given run"
    )
    parser.add_argument(
        "node_config",
        metavar="NODE-CONFIG",
        help="the text of flower-supernode --node-config, in quotes",
    )
    add_words(parser, "the run, as for espalier run; default: the demo")
    parser.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="address to which the node connects; warn if runs can be started there",
    )
    parser.set_defaults(execute=_check_node)


def _check_node(args: argparse.Namespace) -> int:
    take_interrupts()
    try:
        if args.superlink is not None:
            require_address(args.superlink)
            warn_of_answering_control_api(args.superlink)
        # By default the installed app: it is the program that the node would run.
        app = find_app(args.app) if args.app else installed_app()
        run, _ = configuration(app, args.words, on_this_machine=False)
        document = {"node": read_node_config(args.node_config), "run": run}
        # Estimates of memory and disk belong to the server's packages.
        return run_in_app(app, "client_app.node.check_node", document) or run_in_app(
            app, "server_app.estimate.node_fit", document
        )
    except KeyboardInterrupt:
        print("\nespalier: interrupted; the check of the node is incomplete", file=sys.stderr)
        return 130
