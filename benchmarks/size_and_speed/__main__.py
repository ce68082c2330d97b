"""Size, memory, speed and quality of results of runs, relative to their dense model.

    python -m benchmarks.size_and_speed --dense DIRECTORY --result LABEL=RUN ... \\
        --out docs/studies/size-and-speed --work FOLDER [--node-modules FOLDER/node_modules]

Each result is measured next to the dense model, in turns: memory in a process of its own each time,
speed in one process that holds both. An adapter is merged first. Perplexities are those that the
run measured. A result with the shapes of an earlier one, such as a tuned one, needs the same memory
and time, so only its files and its quality are read.

Measures go into a CSV file one program after the other. The same command with more results
continues, and rewrites table and plot. llama.cpp comes with the npm package node-llama-cpp.
"""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.size_and_speed.programs import FILES, LLAMA_CPP, PROGRAMS, Job, measured, refusal
from benchmarks.size_and_speed.report import (
    FIGURES,
    KEYS,
    NOT_SUPPORTED,
    SAME_SHAPES,
    write_report,
)
from benchmarks.size_and_speed.subjects import Subject, open_dense, open_subject
from espalier.environment.bounded_json import read_json_object
from espalier.errors import EspalierError, InputError


def main() -> int:
    """Measure what is missing, and write the report."""
    given = _arguments()
    try:
        dense = open_dense(given.dense)
        subjects = [
            open_subject(text, dense, given.work, given.threads) for text in given.result or ()
        ]
        job = Job(
            given.threads,
            given.prompt_tokens,
            given.new_tokens,
            given.turns,
            given.node_modules,
            given.work,
        )
        conditions = _conditions(dense, job)
        rows = Rows(given.out.with_suffix(".csv"), KEYS, FIGURES, conditions)
        for place, subject in enumerate(subjects):
            _measure(subject, dense, job, rows, _twin_of(subject, [dense, *subjects[:place]]))
        write_report(rows, given.out)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.size_and_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dense", required=True, help="directory of the dense model")
    parser.add_argument(
        "--result", action="append", metavar="LABEL=DIRECTORY", help="a run, or a model directory"
    )
    parser.add_argument("--out", required=True, type=Path, help="path of the files, no suffix")
    parser.add_argument(
        "--work", required=True, type=Path, help="folder for models made on the way"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5, help="measurements of each model")
    parser.add_argument(
        "--node-modules",
        default=os.environ.get("NODE_MODULES", ""),
        help="directory with node-llama-cpp; without it llama.cpp is not measured",
    )
    return parser.parse_args()


def _conditions(dense: Subject, job: Job) -> dict[str, Any]:
    """Return the conditions that all rows share."""
    found: dict[str, Any] = {
        "model": {"name": dense.model.directory.name, "sha256": dense.model.sha256},
        "processor": _processor(),
        "threads": job.threads,
        "prompt_tokens": job.prompt_tokens,
        "new_tokens": job.new_tokens,
        "turns": job.turns,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    if job.node_modules:
        package = Path(job.node_modules) / "node-llama-cpp" / "package.json"
        if not package.is_file():
            raise InputError(
                f"--node-modules {job.node_modules}: has no node-llama-cpp; install it with"
                " npm install --prefix FOLDER node-llama-cpp, and name FOLDER/node_modules"
            )
        found["versions"]["node-llama-cpp"] = read_json_object(package)["version"]
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _twin_of(subject: Subject, before: list[Subject]) -> str:
    """Return the label of an earlier model with the same shapes; empty if there is none.

    Programs need the same memory and time for both, such as a pruned model before and after tuning,
    or the dense model and one with masked weights.
    """
    same = (
        other.label
        for other in before
        if other.shapes == subject.shapes
        and other.model.config["model_type"] == subject.model.config["model_type"]
    )
    return next(same, "")


def _measure(subject: Subject, dense: Subject, job: Job, rows: Rows, twin: str) -> None:
    """Measure a result in each program that was not measured yet."""
    for program in (FILES, *PROGRAMS):
        if program == LLAMA_CPP and not job.node_modules:
            continue
        cell = {"result": subject.label, "method": subject.method, "program": program}
        known = {(row["result"], row["program"]) for row in rows.rows}
        if (subject.label, program) in known:
            continue
        note = ""
        if twin and program != FILES:
            note = f"{SAME_SHAPES}{twin}"
        elif reason := refusal(subject, program, job):
            note = f"{NOT_SUPPORTED}: {reason}"
        if note:
            absent = {"measure": "", "note": note}
            rows.add(cell | absent, value=None, dense=None, ratio=None, load=None)
            continue
        # Rows are added together: an interrupted measurement of a program is repeated as a whole.
        load = os.getloadavg()[0]
        found = list(measured(subject, dense, program, job))
        for one in found:
            of_measure = {"measure": one.name, "note": ""}
            figures = {"value": one.value, "dense": one.dense, "ratio": one.ratio, "load": load}
            rows.add(cell | of_measure, **figures)


if __name__ == "__main__":
    sys.exit(main())
