"""Study of differential privacy on your own model and texts.

    python -m benchmarks.private --model DIRECTORY --private FILE --private FILE --private FILE
    --text NAME=FILE --text NAME=FILE

Every private file belongs to one client; its passages are the records that are protected. Pooled
pruning and FedPETuning run without differential privacy and with epsilon 8, 4, 2 and 1, for every
seed. Noise is made from the seed, so that the study repeats; such noise protects nothing. Runs are
kept in ``--work``, so that an interrupted study continues there. Results go to
``docs/studies/private.csv`` row by row, and finally to a Markdown table next to it.
"""

import argparse
import sys
from functools import partial

from benchmarks.private.quality import (
    DELTA,
    FIGURES,
    KEYS,
    METHODS,
    RATE,
    TITLE,
    quality,
    records_of,
    write_table,
)
from benchmarks.reporting.perplexity_report import Study
from benchmarks.smaller.bench import add_arguments, measure
from benchmarks.study_command import exit_status, new_parser


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.private", __doc__)
    add_arguments(parser, work="runs/private", threads=2)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, help="methods to measure"
    )
    parser.add_argument("--name", default="private", help="name of the results in --out")
    return parser.parse_args()


def _work(given: argparse.Namespace) -> None:
    path = given.out / given.name
    stated = {
        "delta": DELTA,
        "sampling_rate_of_training": RATE,
        "records": {file.name: records_of(file) for file in given.private},
    }
    settings = {"data.sequence-length": given.sequence_length}
    study = Study(TITLE, KEYS, FIGURES, partial(quality, chosen=given.methods))
    rows, conditions = measure(given, study, path, settings, stated)
    write_table(rows, conditions, path)


def main() -> int:
    """Run the study, or its missing parts; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
