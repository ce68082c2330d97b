"""Scores of results of runs on public tasks, next to those of their dense model.

    python -m benchmarks.task_scores --dense DIRECTORY --result LABEL=RUN ... \\
        --data TASK=FILE ... --out docs/studies/task-scores

Every model answers the same items, the first ones of each file, as in ``espalier eval``. Scores go
into a CSV file one model after the other. The same command with more results continues.
"""

import argparse
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.study_command import exit_status, new_parser
from benchmarks.task_scores.report import DENSE, FIGURES, KEYS, write_report
from espalier.errors import InputError
from espalier.results.sources import Source, open_source
from espalier.results.use.harness import Question, load_tasks, require_harness, scores_of


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.task_scores", __doc__)
    parser.add_argument("--dense", required=True, help="directory of the dense model")
    parser.add_argument(
        "--result", action="append", default=[], metavar="LABEL=DIRECTORY",
        help="a run, or a model directory",
    )  # fmt: skip
    parser.add_argument(
        "--data", action="append", required=True, metavar="TASK=FILE",
        help="task of lm-evaluation-harness, and the JSON Lines with its records",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=200, help="number of items of each task")
    parser.add_argument("--out", required=True, type=Path, help="path of the files, no suffix")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser.parse_args()


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    """Return what stands before and after the equals signs."""
    found = dict[str, str]()
    for text in given:
        name, _, value = text.partition("=")
        if not (name and value):
            raise InputError(f"--{flag} {text}: is not of the form NAME=PATH")
        if name in found or name == DENSE:
            raise InputError(f"--{flag} {text}: the name is in use; give another one")
        found[name] = value
    return found


def _sources(dense: str, results: Mapping[str, str]) -> Iterator[tuple[str, Source]]:
    for label, path in {DENSE: dense, **results}.items():
        yield label, open_source(path, adapter=False, client="")


def _work(given: argparse.Namespace) -> None:
    """Evaluate the models that are missing, and write the report."""
    require_harness()
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = _pairs("data", given.data)
    sources = dict(_sources(given.dense, _pairs("result", given.result)))
    conditions: dict[str, Any] = {
        "model": {"name": Path(given.dense).name, "sha256": sources[DENSE].model.sha256},
        "data": {
            task: hashlib.sha256(Path(file).read_bytes()).hexdigest()
            for task, file in files.items()
        },
        "items": given.limit,
        "versions": {name: version(name) for name in ("lm-eval", "torch", "transformers")},
    }
    rows = Rows(given.out.with_name(f"{given.out.name}.csv"), KEYS, FIGURES, conditions)
    question = Question(list(files), (), files, given.limit, None, 8)
    with tempfile.TemporaryDirectory() as folder:
        manager, tasks = load_tasks(question, Path(folder))
        for label, source in sources.items():
            measured = {row["task"] for row in rows.rows if row["result"] == label}
            if measured >= files.keys():
                continue
            scores = scores_of(source, manager, tasks, question, given.device)
            rows.add_all(
                (
                    {"result": label, "task": score.task, "metric": score.metric},
                    {"value": score.value, "stderr": score.stderr},
                )
                for score in scores
            )
            print(f"{label}: evaluated", flush=True)
    write_report(rows, conditions, given.out)


def main() -> int:
    """Evaluate the models; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
