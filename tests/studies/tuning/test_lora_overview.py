"""One table of several studies: means by hand, and arms that a study lacks."""

import csv
import json
from pathlib import Path
from typing import Any

from benchmarks.task_runs.overview import write_report
from benchmarks.task_runs.study import FIGURES, KEYS


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*KEYS, *FIGURES], restval="")
        writer.writeheader()
        writer.writerows(rows)


def test_table_has_means_of_the_chosen_scores(tmp_path: Path) -> None:
    sent = {"megabytes_up": 3.0, "megabytes_down": 2.0}
    rows = [
        {"seed": 0, "arm": "dense", "loss": 3.0, "acc": 0.5},
        {"seed": 1, "arm": "dense", "loss": 3.0, "acc": 0.5},
        {"seed": 0, "arm": "local baseline", "loss": 2.5, "acc": 0.6},
        {"seed": 0, "arm": "FedPETuning", "loss": 2.0, "acc": 0.7, **sent},
        {"seed": 1, "arm": "FedPETuning", "loss": 2.2, "acc": 0.9, **sent},
        {"seed": 0, "arm": "Fed-SB", "loss": 2.1, **sent},
        {"seed": 0, "arm": "FedEx-LoRA", "loss": 2.3, "acc": 0.8, **sent},
    ]
    write_rows(tmp_path / "one.csv", rows)
    write_rows(tmp_path / "other.csv", rows)
    studies = [
        {"name": "one", "title": "One", "figure": "loss", "equal": "steps"},
        {"name": "other", "title": "Other", "figure": "acc", "equal": "bytes", "dense_mean": "one"},
    ]
    for name, base in (("one", "bfloat16"), ("other", "float32")):
        conditions = {"settings": {"training.base": base}}
        (tmp_path / f"{name}.json").write_text(json.dumps(conditions))
    write_report(tmp_path / "overview", {"studies": studies})
    table = (tmp_path / "overview.md").read_text()
    assert "| | One: loss | Other: accuracy | MB |" in table
    assert "another dtype than those of the line in Other (float32, line bfloat16)." in table
    assert "| dense | 3.000 | 0.500 |  |" in table
    assert "| local baseline | 2.500 (1) | 0.600 (1) |  |" in table
    assert "| FedPETuning | 2.100 ± 0.141 | 0.800 ± 0.141 | 5.0 |" in table
    # It has no accuracy.
    assert "| Fed-SB | 2.100 (1) |  | 5.0 |" in table
    assert "dense mean of the updates" in (tmp_path / "overview.svg").read_text()
