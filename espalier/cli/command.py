"""The ``espalier`` command.

    espalier run                                  run the demo
    espalier run fedprllm fedprllm.sparsity=0.6   run a preset of conf/ with other settings
    espalier run num-clients=16                   simulate any number of clients
    espalier run two-sites --superlink HOST:9093  run on the sites connected to a SuperLink
    espalier plan fedsoda model=config-only       estimate bytes, memory, disk and time of a run
    espalier status runs/*                        show the state of runs
    espalier tasks                                show what the records of each task need
    espalier app                                  show the folder of the Flower app
    espalier check-node 'site="a" data-path="notes.txt"' two-sites
                                                  check a --node-config for a run
    espalier node --superlink HOST:9092 --node-config 'site="a"'
                                                  start a warm SuperNode with the installed program
    espalier keys DIRECTORY --server HOST --site a --site b
                                                  make TLS certificates and a key pair per site
    espalier release STATE-DIR                    list, release or refuse replies awaiting approval
    espalier check-log STATE-DIR                  verify the log of what left a site

``espalier run`` does what ``flwr run .`` does, and in addition: it starts as many nodes as there
are clients, returns an exit code that says whether the run completed, retries if Ray fails to
start, resolves paths from the current directory, checks all local files before anything is started,
and uses a SuperLink that never mixes two copies of the project.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import espalier
from espalier.cli.approval import add_check_log, add_release
from espalier.cli.check_node import add_check_node
from espalier.cli.keys import add_keys
from espalier.cli.node import add_node
from espalier.cli.plan import add_plan
from espalier.cli.run import add_run
from espalier.cli.run_status import add_status
from espalier.cli.tasks import add_tasks
from espalier.errors import EspalierError
from espalier.launch.app import find_app
from espalier.launch.configuration import explain_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns
    -------
    0 if the run completed or the node is fine, 1 if it failed, 2 for a wrong request, 130 after an
    interrupt.
    """
    parser = _parser()
    # argcomplete sets this variable when a shell asks for completions.
    if "_ARGCOMPLETE" in os.environ:
        from espalier.cli.completion import complete

        complete(parser)
    words = sys.argv[1:] if arguments is None else arguments
    # Words may also follow options; ``parse_args`` would refuse that.
    given, further = parser.parse_known_args(words)
    if given.command != "node":
        _require_known(parser, given, further, words)
    if given.command is None:
        parser.print_help()
        return 0
    given.arguments = words
    given.further = further
    if given.takes_settings:
        given.words += further
    try:
        code: int = given.execute(given)
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espalier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"espalier {espalier.__version__}")
    parser.set_defaults(takes_settings=False)
    commands = parser.add_subparsers(dest="command")
    app = commands.add_parser(
        "app",
        help="print the folder of the Flower app, with its packages, presets and pyproject.toml",
    )
    app.set_defaults(execute=_show_app)
    add_keys(commands)
    add_node(commands)
    add_run(commands)
    add_check_node(commands)
    add_release(commands)
    add_check_log(commands)
    add_status(commands)
    add_plan(commands)
    add_tasks(commands)
    return parser


def _show_app(_: argparse.Namespace) -> int:
    """Print the folder of the app, for ``flwr run "$(espalier app)"``, and for presets to copy."""
    print(find_app(None))
    return 0


def _require_known(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    further: Sequence[str],
    words: Sequence[str],
) -> None:
    """Exit with an error for unknown options, and for words of a command that takes no settings."""
    if unknown := [word for word in further if word.startswith("-") or not given.takes_settings]:
        why = explain_options(unknown, words, _setting_keys()) if given.takes_settings else ""
        parser.error(why or f"unrecognized arguments: {' '.join(unknown)}")


def _setting_keys() -> list[str]:
    """Return the keys of a run's settings."""
    from espalier.settings.run import default_values

    return list(default_values())


if __name__ == "__main__":
    sys.exit(main())
