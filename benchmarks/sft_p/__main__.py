"""Studies of SFT-P on your own model and texts, and a recount of the paper's figures.

    python -m benchmarks.sft_p variants --model DIRECTORY --private FILE --private FILE --text
    NAME=FILE --text NAME=FILE
    python -m benchmarks.sft_p tables                # seconds, no weights, no network

Every private file belongs to one client, and the evaluation text at the same position has the same
domain. Runs are kept in ``--work``, so that an interrupted study continues there. Results go to
``docs/studies/sft-p-<study>.csv`` row by row, and finally to Markdown tables and a plot next to it.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.reporting.perplexity_report import write_report
from benchmarks.sft_p import tables
from benchmarks.sft_p.conditioning import CHANGES
from benchmarks.sft_p.runs import TRAINED
from benchmarks.sft_p.studies import STUDIES
from benchmarks.smaller.bench import add_arguments, measure
from benchmarks.study_command import exit_status, new_parser
from espalier.errors import InputError


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.sft_p", __doc__)
    commands = parser.add_subparsers(dest="study", required=True)
    tables = commands.add_parser(
        "tables", help="count what the paper prints, and what it does not; no weights"
    )
    tables.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for tables.md and tables.csv"
    )
    for name, study in STUDIES.items():
        add_arguments(commands.add_parser(name, help=study.title), work="runs/sft-p", threads=1)
    return parser.parse_args()


def main() -> int:
    """Run one study; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _count(given) if given.study == "tables" else _measure(given))


def _count(given: argparse.Namespace) -> None:
    if given.out:
        tables.write(given.out)
    print(tables.report(), end="")


def _measure(given: argparse.Namespace) -> None:
    """Run the missing parts of a study and write its report.

    Each private text needs an evaluation text.
    """
    if len(given.private) != len(given.text):
        raise InputError(
            f"{len(given.private)} private texts and {len(given.text)} public ones; give one of"
            " each domain"
        )
    study = STUDIES[given.study]
    path = given.out / f"sft-p-{given.study}"
    training = TRAINED | (CHANGES if given.study == "conditioning" else {})
    rows, conditions = measure(given, study, path, {}, {"training": training})
    write_report(study, rows, conditions, path)


if __name__ == "__main__":
    sys.exit(main())
