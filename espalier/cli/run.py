"""``espalier run``: simulate a federation here, or start a run on a SuperLink."""

import argparse

from espalier.cli import Commands
from espalier.cli.app_commands import add_words
from espalier.cli.recovery import run_and_recover
from espalier.cli.run_request import RunRequest, run


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
        "--no-measure",
        action="store_true",
        help="do not measure memory and tokens per second of the base model and the result at the"
        " end of a simulation",
    )
    parser.add_argument(
        "--recover",
        action="store_true",
        help="tune the pruned model afterwards (preset recover), with the same clients and data;"
        " settings hold for the runs that read them",
    )
    parser.set_defaults(execute=_execute)


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpus-per-client``."""
    parser.add_argument(
        "--gpus-per-client",
        type=float,
        default=0.0,
        help="fraction of a GPU for each simulated client",
    )


def _execute(args: argparse.Namespace) -> int:
    """Run the app as the parsed command line says."""

    request = RunRequest(
        args.arguments,
        args.words,
        args.app,
        args.gpus_per_client,
        args.superlink,
        args.root_certificates,
        not args.no_measure,
    )
    return run_and_recover(request) if args.recover else run(request)
