"""Prune and fine-tune language models with the private text of several sites.

    espalier run                                  run the demo
    espalier run fedprllm pruning.sparsity=0.6    run a preset of conf/ with other settings
    espalier run num-clients=16                   simulate any number of clients
    espalier run llm-pruner --recover             prune a model, then tune the result
    espalier run two-sites --superlink HOST:9093  run on the sites connected to a SuperLink
    espalier plan fedsoda model=config-only       estimate bytes, memory, disk and time of a run
    espalier runs                                 list runs with their status and main figures
    espalier compare RUN RUN --out compare.html   compare the results and costs of runs
    espalier sweep flap pruning.ratio=0.1,0.2 --out DIRECTORY
                                                  run a grid of settings and compare the results
    espalier eval RUN --tasks arc_easy            evaluate a result with lm-evaluation-harness
    espalier chat RUN --compare                   talk to a result and to its base model
    espalier report RUN                           write a page on a run (report.html)
    espalier export RUN --to gguf --out DIR       save a result for transformers, llama.cpp, the hub
    espalier tasks                                show what the records of each task need
    espalier app                                  show the folder of the Flower app
    espalier check-node 'site="a" data-path="notes.txt"' two-sites
                                                  check a --node-config for a run
    espalier node --superlink HOST:9092 --node-config 'site="a"'
                                                  start a warm SuperNode with the installed program
    espalier keys DIRECTORY --server HOST --site a --site b
                                                  make TLS certificates and a key pair per site
    espalier approve STATE-DIR                    list, approve or refuse replies awaiting approval
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
from espalier.cli.app_commands import add_app_commands
from espalier.cli.comparison import add_compare, add_runs
from espalier.cli.export import add_export
from espalier.cli.keys import add_keys
from espalier.cli.node import add_node
from espalier.cli.run import add_run
from espalier.cli.sweep import add_sweep
from espalier.cli.use import add_use
from espalier.errors import EspalierError, tell
from espalier.launch.configuration import explain_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 if the run completed or the node is fine, 1 if it failed, 2 for a wrong request, 130 after an
    interrupt.
    """
    parser = _parser()
    # argcomplete sets this variable when a shell asks for completions.
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(parser)
    words = sys.argv[1:] if arguments is None else arguments
    # Words may also follow options; ``parse_args`` would refuse that.
    args, further = parser.parse_known_args(words)
    args.arguments = words
    args.further = further
    if args.takes_settings:
        args.words += further
        further = [word for word in further if word.startswith("-")]
    # ``espalier node`` passes further options to ``flower-supernode``.
    if further and args.command != "node":
        # The parser of the command, which prints its own options.
        args.parsers.get(args.command, parser).error(
            _explained(args, further) or f"unrecognized arguments: {' '.join(further)}"
        )
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int = args.execute(args)
    except EspalierError as error:
        tell(error)
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
    add_run(commands)
    add_node(commands)
    add_keys(commands)
    add_runs(commands)
    add_compare(commands)
    add_sweep(commands)
    add_use(commands)
    add_app_commands(commands)
    add_export(commands)
    parser.set_defaults(parsers=commands.choices)
    return parser


def _explained(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Return what to write in place of unknown options; empty if they are no settings."""
    if not args.takes_settings:
        return ""
    from espalier.settings.keys import default_values

    return explain_options(unknown, args.arguments, list(default_values()))


if __name__ == "__main__":
    sys.exit(main())
