"""Rewrite tables and figures of studies from their measurements; no model is opened.

    python -m benchmarks.reports docs/studies

Every study has a JSON file with its conditions, and most have a CSV file with their rows.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.fedsoda import memory as fedsoda_memory
from benchmarks.fedsoda import report as fedsoda_report
from benchmarks.fedsoda import studies as fedsoda_studies
from benchmarks.fedspallm import studies as fedspallm_studies
from benchmarks.fedspine import regret, steps
from benchmarks.fedspine import report as regret_report
from benchmarks.fedspine.tasks import report as task_report
from benchmarks.fedspine.tasks import results as task_results
from benchmarks.fedspine.tasks import study as task_study
from benchmarks.leakage import report as leakage_report
from benchmarks.memory import nf4_base
from benchmarks.pooled.claims import STUDY as CLAIMS
from benchmarks.pooled.quality import STUDY as POOLED
from benchmarks.private import quality as private
from benchmarks.reporting import perplexity_report
from benchmarks.reporting.rows import Rows
from benchmarks.robust import study as robust_study
from benchmarks.sft_p import studies as sft_p_studies
from benchmarks.size_and_speed import report as size_and_speed
from benchmarks.smaller import studies as smaller_studies
from benchmarks.smaller.times import write_times
from benchmarks.speed import structured
from benchmarks.studies import report as fedprllm_report
from benchmarks.studies.rows import Rows as CellRows
from benchmarks.study_command import exit_status, new_parser
from benchmarks.task_runs import overview
from benchmarks.task_runs import report as task_runs_report
from benchmarks.task_runs import study as task_runs_study
from benchmarks.task_scores import report as task_scores_report
from benchmarks.tuning import partitions
from benchmarks.tuning import report as tuning_report
from benchmarks.tuning import studies as tuning_studies
from espalier.errors import InputError

Conditions = dict[str, Any]
Report = Callable[[Path, Conditions], None]
"""Writes the report of the study ``path``, a path without suffix, from its files."""


def _rows(path: Path, keys: tuple[str, ...], figures: tuple[str, ...], given: Conditions) -> Rows:
    return Rows(path.with_name(f"{path.name}.csv"), keys, figures, given)


def _name(path: Path) -> str:
    return path.name.partition("-")[2]


def _perplexities(studies: Mapping[str, perplexity_report.Study], prefix: str) -> Report:
    def write(path: Path, given: Conditions) -> None:
        # What follows the study's name is that of another model.
        name = path.name.removeprefix(prefix)
        known = [one for one in studies if name.startswith(one)]
        if not known:
            raise InputError(f"{path}: is of no known study of {', '.join(studies)}")
        study = studies[max(known, key=len)]
        rows = _rows(path, study.keys, study.figures, given)
        perplexity_report.write_report(study, rows, given, path)

    return write


def _latency(path: Path, given: Conditions) -> None:
    study = smaller_studies.STUDIES["latency"]
    write_times(study.title, _rows(path, study.keys, study.figures, given), path)


def _tuning(path: Path, given: Conditions) -> None:
    study = tuning_studies.STUDIES[_name(path)]
    rows = _rows(path, tuning_studies.KEYS, tuning_studies.FIGURES, given)
    tuning_report.write_report(study.title, study.tables, rows, given, path)


def _partitions(path: Path, given: Conditions) -> None:
    keys = partitions.PARTITION_KEYS
    partitions.plot_partitions(_rows(path, keys, partitions.PARTITION_FIGURES, given), path)


def _fedprllm(path: Path, given: Conditions) -> None:
    rows = CellRows(path.with_name(f"{path.name}.csv"), given)
    fedprllm_report.write_report(path.name.partition("-ties-")[0], rows, path)


def _regret(path: Path, given: Conditions) -> None:
    regret_report.write_report(_rows(path, regret.KEYS, regret.FIGURES, given), path)


def _steps(path: Path, given: Conditions) -> None:
    steps.report(given, path.with_name(f"{path.name}.json"))


def _fedspine_task(path: Path, given: Conditions) -> None:
    found = task_results.found_in(task_study.files_of(path, given), given["metric"])
    task_report.write_report(task_study.TITLE.format(_name(path)), found, given, path)


def _fedsoda(path: Path, given: Conditions) -> None:
    study = fedsoda_studies.STUDIES[_name(path)]
    rows = _rows(path, study.keys, study.figures, given)
    fedsoda_report.write_report(study, rows, given, path)


def _fedsoda_memory(path: Path, given: Conditions) -> None:
    rows = _rows(path, fedsoda_memory.KEYS, fedsoda_memory.FIGURES, given)
    fedsoda_memory.write_table(rows, path)


def _nf4_base(path: Path, given: Conditions) -> None:
    nf4_base.report(_rows(path, nf4_base.KEYS, nf4_base.FIGURES, given), given, path)


def _size_and_speed(path: Path, given: Conditions) -> None:
    size_and_speed.write_report(
        _rows(path, size_and_speed.KEYS, size_and_speed.FIGURES, given), path
    )


def _structured(path: Path, given: Conditions) -> None:
    structured.report(given, path)


def _task_runs(path: Path, given: Conditions) -> None:
    rows = _rows(path, task_runs_study.KEYS, task_runs_study.FIGURES, given)
    task_runs_report.write_report(path.name.removeprefix("task-runs-"), rows, given, path)


def _task_scores(path: Path, given: Conditions) -> None:
    rows = _rows(path, task_scores_report.KEYS, task_scores_report.FIGURES, given)
    task_scores_report.write_report(rows, given, path)


def _private(path: Path, given: Conditions) -> None:
    private.write_table(_rows(path, private.KEYS, private.FIGURES, given), given, path)


def _robust(path: Path, given: Conditions) -> None:
    rows = _rows(path, robust_study.KEYS, robust_study.FIGURES, given)
    robust_study.write_report(rows, given, path)


def _leakage(path: Path, given: Conditions) -> None:
    rows = _rows(path, leakage_report.KEYS, leakage_report.FIGURES, given)
    leakage_report.write_report(rows.rows, given, path)


REPORTS: dict[str, Report | None] = {
    "fedspallm-": _perplexities(fedspallm_studies.STUDIES, "fedspallm-"),
    "smaller-": _perplexities(smaller_studies.STUDIES, "smaller-"),
    "smaller-latency": _latency,
    "sft-p-": _perplexities(sft_p_studies.STUDIES, "sft-p-"),
    "tuning-": _tuning,
    partitions.PARTITIONS: _partitions,
    **dict.fromkeys(fedprllm_report.TITLES, _fedprllm),
    "fedspine-": _fedspine_task,
    "fedspine-regret": _regret,
    "fedspine-steps-": _steps,
    "fedsoda-": _fedsoda,
    "fedsoda-memory": _fedsoda_memory,
    "nf4-base-": _nf4_base,
    "leakage-": _leakage,
    "private-": _private,
    "robust-": _robust,
    "mask-": _perplexities({"claims": CLAIMS}, "mask-"),
    "pooled-": _perplexities({"quality": POOLED}, "pooled-"),
    "size-and-speed": _size_and_speed,
    "structured-": _structured,
    "task-runs-": _task_runs,
    "task-scores": _task_scores,
    "federated-lora": overview.write_report,
    # Their measurements cannot be made into a report again.
    "plan": None,
    "membership": None,
}
"""Report of a study, by the longest beginning of its name; None if a study only writes its own."""
PARTS = ("-curves", "-devices", "-energy")
"""Endings of files that belong to the study without this ending."""


def studies_in(directory: Path) -> list[str]:
    """Return the names of the studies in a directory."""
    names = (file.name.removesuffix(".json") for file in directory.glob("*.json"))
    return sorted(name for name in names if not name.endswith(PARTS))


def write_again(path: Path) -> bool:
    """Write the report of the study ``path``, a path without suffix.

    Returns
    -------
    bool
        False if a report of this study is written only with its measurements.

    Raises
    ------
    InputError
        The study is unknown, or its files are damaged.
    """
    known = [start for start in REPORTS if path.name.startswith(start)]
    if not known:
        raise InputError(f"{path}: is of no known study; give a directory with results of studies")
    report = REPORTS[max(known, key=len)]
    if report is not None:
        report(path, json.loads(path.with_name(f"{path.name}.json").read_text()))
    return report is not None


def _write_all(directory: Path) -> None:
    for name in studies_in(directory):
        print(f"{name}: {'written' if write_again(directory / name) else 'unchanged'}")


def main() -> int:
    """Rewrite all reports of a directory; return 2 after an error."""
    parser = new_parser("benchmarks.reports", __doc__)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    return exit_status(lambda: _write_all(given.directory))


if __name__ == "__main__":
    sys.exit(main())
