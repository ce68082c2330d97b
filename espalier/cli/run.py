"""``espalier run``: simulate a federation here, or start a run on a SuperLink."""

import argparse
import shlex
import sys
from pathlib import Path

from espalier.cli import Commands
from espalier.cli.app_commands import add_words
from espalier.errors import InputError, RefusedError, RunError, RunInterrupted, tell
from espalier.launch.addresses import require_address
from espalier.launch.app import find_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration
from espalier.launch.run import WatchedRun, simulate, submit
from espalier.launch.run_output import run_output


def add_run(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="simulate a federation on this machine, or start a run on a SuperLink",
        epilog=(
            "Presets are the files in conf/ of the app and in its folders papers and examples: ls"
            ' "$(espalier app)"/conf/{,papers,examples}. Keys are listed in'
            " docs/reference/settings.md; after an unknown key the command names similar ones."
        ),
    )
    add_words(parser, "a preset in conf/, and settings that differ from it")
    add_gpus(parser)
    parser.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="Control API of a running SuperLink; default: a simulation",
    )
    parser.add_argument(
        "--root-certificates",
        metavar="FILE",
        help="root certificates of that SuperLink; default: no TLS",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="at the end, measure memory and tokens per second of the base model and the result for"
        " report.html",
    )
    parser.set_defaults(execute=run)


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpus-per-client``."""
    parser.add_argument(
        "--gpus-per-client",
        type=float,
        default=0.0,
        help="fraction of a GPU for each simulated client",
    )


def run(args: argparse.Namespace) -> int:
    """Run the app and return the exit code of the command."""
    take_interrupts()
    watched = WatchedRun("give the same command again", lambda path: _resuming(args, path))
    try:
        return _run(args, watched)
    except RefusedError:
        # The check has printed why.
        return 2
    except RunError as error:
        for part in error.parts:
            tell(part)
        return 1
    except RunInterrupted as interrupted:
        print(f"\nespalier: interrupted; {interrupted.resume_hint}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"\nespalier: interrupted; {watched.resume_hint()}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, watched: WatchedRun) -> int:
    """Run the app and return 0, or the exit code of the measurement after the run."""
    if args.superlink is not None:
        require_address(args.superlink)
        if args.measure:
            raise InputError(
                "--measure: the result of a run on a SuperLink is on that machine; give `espalier"
                " report RUN --measure` there"
            )
    app = find_app(args.app)
    config, settings = configuration(app, args.words, on_this_machine=args.superlink is None)
    with run_output(settings.method) as watched.say:
        if args.superlink is None:
            simulate(watched, app, config, settings, args.gpus_per_client)
        else:
            submit(watched, app, config, args.superlink, args.root_certificates)
    return _measured(app, watched.directory) if args.measure else 0


def _measured(app: Path, directory: str) -> int:
    """Measure the models of a finished run, write its report again, and return an exit code.

    This happens in a process of its own, as in ``espalier report``.
    """
    document = {"directories": [directory], "out": None, "measure": True}
    try:
        return run_in_app(app, "espalier.results.report.command", document)
    except KeyboardInterrupt:
        command = shlex.join(["espalier", "report", directory, "--measure"])
        tell(f"interrupted; the run is complete, and `{command}` measures its models")
        return 130


def _resuming(args: argparse.Namespace, directory: str) -> str:
    words = [word for word in args.arguments if not word.startswith("resume-from=")]
    return shlex.join(["espalier", *words, f"resume-from={directory}"])
