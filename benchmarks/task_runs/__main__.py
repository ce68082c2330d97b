"""Comparison of the tuning methods on one task, on your own model and records.

    python -m benchmarks.task_runs dolly --model DIRECTORY --data 'DIR/{client}.jsonl' --test FILE \
        --public FILE --text NAME=FILE

All methods take 30 steps of each of four clients: five rounds of six steps, or those of ``--set``.
With ``--equal bytes`` the methods of federated LoRA take as many of these rounds as fit in the
bytes of FedPETuning's. ``--public`` is the text on which FedSODA's server aligns, and from which
LLM-Pruner's clients take samples. Runs are kept in ``--work``, so that an interrupted study
continues there. Results go to ``docs/studies/task-runs-<task>.csv`` row by row, and finally to a
Markdown table and a plot next to it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from benchmarks.study_command import add_arguments, chosen, exit_status, new_parser
from benchmarks.task_runs.arms import ARMS, BASE, COMMON, LORA, TASKS
from benchmarks.task_runs.energy import rows_beside
from benchmarks.task_runs.equal_bytes import rounds_within
from benchmarks.task_runs.report import write_report
from benchmarks.task_runs.study import FIGURES, KEYS, measure_arms
from espalier.hf.opening.opened_model import open_model
from espalier.storage.blobs import sha256

CLIENTS = 4


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.task_runs", __doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    names = "model text set seeds threads work out"
    add_arguments(parser, names, seeds=[0], work=Path("runs/task-runs"))
    parser.add_argument("--data", required=True, help="training records, {client} for its number")
    parser.add_argument("--test", type=Path, required=True, help="test items")
    parser.add_argument("--public", type=Path, required=True, help="public text of the server")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=None, metavar="ARM")
    told = "bytes: as many rounds of each federated LoRA as fit in the bytes of FedPETuning"
    parser.add_argument("--equal", choices=("steps", "bytes"), default="steps", help=told)
    return parser.parse_args()


def _common(given: argparse.Namespace) -> dict[str, Any]:
    return {
        **COMMON,
        **TASKS[given.task],
        "num-clients": CLIENTS,
        "model": given.model,
        "threads": given.threads,
        "data.source": "files",
        "data.path": given.data,
        "task.name": given.task,
        "task.test-path": str(given.test),
        "evaluation.texts": ",".join(given.text),
        **chosen(given.set),
    }


def _work(given: argparse.Namespace) -> None:
    """Run the missing arms and write the report."""
    by_bytes = given.equal == "bytes"
    path = given.out / f"task-runs-{given.task}{'-equal-bytes' if by_bytes else ''}"
    common = _common(given)
    model = open_model(given.model)
    names = given.arms or list(LORA if by_bytes else ARMS)
    reference = {**common, **ARMS[BASE].settings}
    rounds = {
        name: rounds_within({**common, **ARMS[name].settings}, reference, model)
        for name in (names if by_bytes else ())
    }
    private = [Path(given.data.format(client=client)) for client in range(CLIENTS)]
    paths = ("model", "data.path", "task.test-path", "evaluation.texts")
    conditions = {
        "model": {"name": model.directory.name, "sha256": model.sha256},
        "training": [sha256(path.read_bytes()) for path in dict.fromkeys(private)],
        "test": sha256(given.test.read_bytes()),
        "settings": {key: value for key, value in common.items() if key not in paths},
    }
    if by_bytes:
        conditions["rounds"] = rounds
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    bench = Bench(common, given.model, private, given.seeds, given.work.absolute())
    measure_arms(bench, rows, str(given.public), names, rounds, rows_beside(path, conditions))
    write_report(given.task, rows, conditions, path, given.equal)


def main() -> int:
    """Run a study; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
