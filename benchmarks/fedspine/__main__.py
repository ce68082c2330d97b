"""What FedSpine's bandit regrets on rewards that are known; a minute on one core, no model.

    python -m benchmarks.fedspine regret [--seeds 0 1 2] [--out docs/studies]

Results go to ``fedspine-regret.csv`` row by row, so that a study that was stopped goes on, then to a Markdown table and a plot.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.fedspallm.rows import Rows
from benchmarks.fedspine.regret import FIGURES, KEYS, NOISE, ROUNDS, measure
from benchmarks.fedspine.report import write_report
from espalier.settings.mistakes import Mistake


def main(arguments: list[str] | None = None) -> int:
    """Do one study; 2 after a mistake, which is told on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fedspine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="study", required=True)
    regret = commands.add_parser("regret", help="cumulative regret of S-UCB, of random arms and of the best fixed arm")
    regret.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    regret.add_argument("--out", type=Path, default=Path("docs/studies"))
    given = parser.parse_args(arguments)
    path = given.out / "fedspine-regret"
    try:
        rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, {"rounds": ROUNDS, "noise": NOISE})
        measure(rows, given.seeds)
    except Mistake as mistake:
        print(f"{mistake}", file=sys.stderr)
        return 2
    write_report(rows, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
