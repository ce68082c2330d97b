"""Scores on public tasks: the table by hand, and the command with tiny models."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.reporting.rows import Rows
from benchmarks.task_scores.__main__ import main
from benchmarks.task_scores.report import FIGURES, KEYS, write_report
from tests.tiny_model import save_tiny_llama

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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra lm-eval")
def test_command_goes_on_with_more_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {
            "question": {
                "stem": f"which tree {number}",
                "choices": [
                    {"text": word, "label": label}
                    for word, label in zip(("oak", "fir"), "AB", strict=True)
                ],
            },
            "answerKey": "AB"[number % 2],
        }
        for number in range(4)
    ]
    data = tmp_path / "arc.jsonl"
    data.write_text("\n".join(json.dumps(record) for record in records))
    dense = save_tiny_llama(tmp_path / "base", dtype=torch.float32, positions=64)
    # The same weights again: every score has to be that of the dense model.
    same = save_tiny_llama(tmp_path / "same", dtype=torch.float32, positions=64)
    words = ["scores", "--dense", str(dense), "--data", f"arc_easy={data}", "--limit", "4"]
    words += ["--device", "cpu", "--out", str(tmp_path / "scores")]
    for results in ([], ["--result", f"LLM-Pruner, 20%={same}"]):
        monkeypatch.setattr("sys.argv", words + results)
        assert main() == 0
    assert capsys.readouterr().out.count("dense: evaluated") == 1
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [
        [row["value"] for row in rows if row["result"] == name]
        for name in ("dense", "LLM-Pruner, 20%")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2

    monkeypatch.setattr("sys.argv", [*words, "--result", "dense=elsewhere"])
    assert main() == 2
    assert "--result dense=elsewhere: the name is in use" in capsys.readouterr().err
