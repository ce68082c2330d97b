"""Comparison of the methods that make models smaller or sparser, on your own model and texts.

    python -m benchmarks.smaller recovery --model DIRECTORY --private FILE --private FILE --text
    NAME=FILE --text NAME=FILE
    python -m benchmarks.smaller selections ...
    python -m benchmarks.smaller latency ...

Every private file belongs to one client. ``recovery`` comes before ``latency``; its runs are kept
in ``--work``, so that an interrupted study continues there. Results go to
``docs/studies/smaller-<study>.csv`` row by row, and finally to Markdown tables and a plot next to
it.
"""

import argparse
import sys

from benchmarks.reporting.perplexity_report import write_report
from benchmarks.smaller.bench import add_arguments, measure
from benchmarks.smaller.studies import STUDIES
from benchmarks.smaller.times import write_times
from benchmarks.study_command import exit_status, new_parser


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.smaller", __doc__)
    parser.add_argument("study", choices=sorted(STUDIES))
    add_arguments(parser, work="runs/smaller", threads=2)
    return parser.parse_args()


def _work(given: argparse.Namespace) -> None:
    """Run the missing parts of a study, and write its report."""
    study = STUDIES[given.study]
    path = given.out / f"smaller-{given.study}"
    settings = {"data.sequence-length": given.sequence_length}
    rows, conditions = measure(given, study, path, settings, {})
    if given.study == "latency":
        write_times(study.title, rows, path)
    else:
        write_report(study, rows, conditions, path)


def main() -> int:
    """Run a study; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
