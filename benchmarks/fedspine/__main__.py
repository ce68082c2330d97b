"""Studies of FedSpine: regret of the bandit (a minute, no model), cost of a step, and task scores.

    python -m benchmarks.fedspine regret [--seeds 0 1 2] [--out docs/studies]
    python -m benchmarks.fedspine steps [--shape 0.1b] [--out docs/studies]
    python -m benchmarks.fedspine tasks --model ENCODER --task sst2 --train FILE --test FILE --parts
    methods grid
    python -m benchmarks.fedspine tasks --model DIRECTORY --task dolly --clients DIRECTORY --test
    FILE

Results go to ``fedspine-<study>.csv`` row by row, so that an interrupted study continues there, and
then to a Markdown table and plots.
"""

import argparse
import sys

from benchmarks.fedspine import steps
from benchmarks.fedspine.regret import FIGURES, KEYS, NOISE, ROUNDS, measure
from benchmarks.fedspine.report import write_report
from benchmarks.fedspine.tasks import study as task_study
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import add_arguments, exit_status, new_parser


def main(arguments: list[str] | None = None) -> int:
    """Run one study; return 2 after an error."""
    parser = new_parser("benchmarks.fedspine", __doc__)
    commands = parser.add_subparsers(dest="study", required=True)
    regret = commands.add_parser(
        "regret", help="cumulative regret of S-UCB, of random arms and of the best fixed arm"
    )
    add_arguments(regret, "seeds out", seeds=list(range(10)))
    steps.add_arguments(
        commands.add_parser(
            "steps", help="seconds and memory of a step by pruning ratio and rank; no text"
        )
    )
    task_study.add_arguments(
        commands.add_parser(
            "tasks", help="scores of devices' own models on a task, by the fleet's clock"
        )
    )
    given = parser.parse_args(arguments)
    studies = {"regret": _regret, "steps": steps.work, "tasks": task_study.work}
    return exit_status(lambda: studies[given.study](given))


def _regret(given: argparse.Namespace) -> None:
    path = given.out / "fedspine-regret"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, {"rounds": ROUNDS, "noise": NOISE})
    measure(rows, given.seeds)
    write_report(rows, path)


if __name__ == "__main__":
    sys.exit(main())
