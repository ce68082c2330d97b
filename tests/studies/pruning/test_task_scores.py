"""Table of scores on public tasks, by hand."""

from pathlib import Path

from benchmarks.reporting.rows import Rows
from benchmarks.task_scores.report import FIGURES, KEYS, write_report

CONDITIONS = {
    "model": {"name": "small", "sha256": "00"},
    "data": {"piqa": "11", "hellaswag": "22"},
    "items": 4,
    "versions": {"lm-eval": "0.4"},
}


def test_table_has_the_usual_score_of_each_task(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "scores.csv", KEYS, FIGURES, CONDITIONS)
    for label, task, metric, value in (
        ("dense", "piqa", "acc", 0.75),
        ("dense", "hellaswag", "acc", 0.1),
        ("dense", "hellaswag", "acc_norm", 0.5),
        ("FLAP, 20%", "piqa", "acc", 0.5),
        ("FLAP, 20%, tuned", "piqa", "acc", 0.25),
        ("FLAP, 20%, tuned", "hellaswag", "acc_norm", 0.25),
    ):
        cell = {"result": label, "task": task, "metric": metric}
        rows.add(cell, value=value, stderr=0.125)
    write_report(rows, CONDITIONS, tmp_path / "scores")
    table = (tmp_path / "scores.md").read_text()
    assert "| | piqa | hellaswag, by length |" in table
    assert "| dense | 0.750 ± 0.125 | 0.500 ± 0.125 |" in table
    assert "| FLAP, 20% | 0.500 ± 0.125 |  |" in table
    assert "| FLAP, 20%, tuned | 0.250 ± 0.125 | 0.250 ± 0.125 |" in table
    assert (tmp_path / "scores.svg").exists()
