"""Studies of FedSODA: a recount of the paper's tables, and comparisons on your own model and task.

    python -m benchmarks.fedsoda tables                       # seconds, no weights, no network
    python -m benchmarks.fedsoda tables --out docs/studies/fedsoda --tokens 2048
    python -m benchmarks.fedsoda methods --model DIRECTORY --data FILE --test FILE --public FILE
    python -m benchmarks.fedsoda ablation | combinations | public | rounds | memory ...

``tables`` recounts the figures of Tables 2, 4, 7 and 8, section 5 and appendix C, and lists those
that cannot be reproduced. It prints Markdown; with ``--out`` it also writes ``tables.md``, and
``tables.csv`` with a row for each printed figure.

The other studies train. ``--data`` is the task's training file, whose records are distributed to
ten clients, ``--test`` its test items, and ``--public`` a text of another domain, on which the
server compares blocks and aligns. Results of runs are kept in ``--work``, for all studies together;
rows go to ``docs/studies/fedsoda-<study>.csv`` (an interrupted study continues there), and finally
to a Markdown table and a plot next to it. ``--set KEY=VALUE`` changes a setting of all runs. The
model needs at least 8 blocks.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.study_command import add_arguments, exit_status, new_parser
from espalier.errors import InputError


def _tables(given: argparse.Namespace) -> None:
    from benchmarks.fedsoda import paper_models, recount, tables

    if given.tokens < 1:
        raise InputError(f"--tokens {given.tokens}: must be at least 1")
    models = paper_models.models()
    figures = recount.figures(models, given.tokens)
    text = tables.report(models, figures, given.tokens)
    if given.out:
        tables.write(figures, text, given.out)
    print(text, end="")


def _measure(given: argparse.Namespace) -> None:
    from benchmarks.fedsoda.measured_study import measure

    measure(given)


def _memory(given: argparse.Namespace) -> None:
    from benchmarks.fedsoda.memory import measure

    measure(given)


MEASURED = {
    "methods": "four methods over four distributions of the data",
    "ablation": "with and without the two alignments",
    "combinations": "layers of a group, groups, and the interval of alignment",
    "public": "public text of the task's domain, or of another",
    "rounds": "loss after every round",
}
COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tables": _tables, **dict.fromkeys(MEASURED, _measure), "memory": _memory
}  # fmt: skip
"""Function of each study by name.

Each imports its own modules, so that a recount does not wait for training libraries.
"""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("benchmarks.fedsoda", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("tables", help="count what the paper prints; no weights")
    tables.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for tables.md and tables.csv"
    )
    tables.add_argument(
        "--tokens", type=int, default=512, help="of the sequence whose operations are counted"
    )
    for name, what in {**MEASURED, "memory": "peak memory of a client, by method"}.items():
        _add_measured(commands.add_parser(name, help=what))
    return parser.parse_args(arguments)


def _add_measured(study: argparse.ArgumentParser) -> None:
    names = "model set seeds threads device work out"
    add_arguments(study, names, device="cpu", work=Path("runs/fedsoda"))
    study.add_argument("--task", default="arc-easy", help="whose records are in --data and --test")
    study.add_argument("--data", type=Path, required=True, help="training records, JSON Lines")
    study.add_argument("--test", type=Path, required=True, help="test items, JSON Lines")
    study.add_argument("--public", type=Path, required=True, help="text of another domain")
    study.add_argument("--records", type=int, default=1000, help="of all clients together, at most")
    study.add_argument(
        "--characters", type=int, default=100_000, help="of each public text, at most"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one study; return 2 after an error."""
    given = _arguments(arguments)
    return exit_status(lambda: COMMANDS[given.command](given))


if __name__ == "__main__":
    sys.exit(main())
