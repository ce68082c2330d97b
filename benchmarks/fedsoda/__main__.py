"""Repeat the tables of FedSODA's paper.

    python -m benchmarks.fedsoda tables                       # seconds, no weights, no network
    python -m benchmarks.fedsoda tables --out docs/studies/fedsoda --tokens 2048

``tables`` counts what Tables 2, 4, 7 and 8, section 5 and appendix C print, and says which of it cannot be reproduced. It
prints Markdown; with ``--out`` it also writes ``tables.md`` and, a row for each printed figure, ``tables.csv``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from espalier.settings.mistakes import Mistake


def _tables(given: argparse.Namespace) -> None:
    from benchmarks.fedsoda import tables

    if given.tokens < 1:
        raise Mistake(f"--tokens {given.tokens}: must be at least 1")
    models = tables.models()
    figures = tables.figures(models, given.tokens)
    text = tables.report(models, figures, given.tokens)
    if given.out:
        tables.write(figures, text, given.out)
    print(text, end="")


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"tables": _tables}
"""Name of a study -> what does it. Each imports its own needs, so that counting does not wait for what trains."""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fedsoda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("tables", help="count what the paper prints; no weights")
    tables.add_argument("--out", type=Path, metavar="DIR", help="directory for tables.md and tables.csv")
    tables.add_argument("--tokens", type=int, default=512, help="of the sequence whose operations are counted")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one study; 2 after a mistake, which is told on stderr."""
    given = _arguments(arguments)
    try:
        COMMANDS[given.command](given)
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
