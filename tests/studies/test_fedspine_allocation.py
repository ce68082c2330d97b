"""The study of who chooses ratios and ranks, on a tiny model, cell by cell."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from bench import home, private_text

from benchmarks.fedspallm.report import write_report
from benchmarks.fedspallm.rows import Rows
from benchmarks.fedspine import allocation
from benchmarks.fedspine.allocation import ALLOCATION, dealt_to_devices
from benchmarks.smaller.bench import Bench
from espalier.settings.mistakes import Mistake


def test_every_line_of_a_text_is_one_device_s(tmp_path: Path) -> None:
    texts = [tmp_path / f"{name}.txt" for name in "abc"]
    for text in texts:
        text.write_text("".join(f"{text.stem} {number}\n" for number in range(11)))
    found = [file.read_text().splitlines() for file in dealt_to_devices(texts, tmp_path / "devices")]
    assert [{line[0] for line in lines} for lines in found] == [{"abc"[device % 3]} for device in range(10)]
    assert sorted(line for lines in found for line in lines) == sorted(f"{name} {n}" for name in "abc" for n in range(11))
    with pytest.raises(Mistake, match=r"--private .*nowhere.txt: cannot be read"):
        dealt_to_devices([tmp_path / "nowhere.txt"], tmp_path / "devices")


def test_a_row_is_the_mean_over_devices_and_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "SHARES", (0.3,))
    monkeypatch.setattr(allocation, "FLEET", "low")
    monkeypatch.setattr(allocation, "CHOICES", {"bandits": {}, "schedule": allocation.CHOICES["schedule"]})
    monkeypatch.setattr(allocation, "UNPRUNED", {"FedPETuning": {"method": "fedpetuning"}})
    short = {"lora.rank": 4, "federation.rounds": 2, "training.steps": 2, "data.window-tokens": 16}
    monkeypatch.setattr(allocation, "TRAINED", allocation.TRAINED | short)
    shared, private = home(tmp_path), []
    for client in range(3):
        private.append(tmp_path / f"text-{client}.txt")
        private[-1].write_text(private_text(client))
    common = {
        "model": str(shared.model), "threads": 1, "evaluation.texts": f"public={shared.public}", "evaluation.window-tokens": 16,
        "evaluation.max-windows": 2, "evaluation.local-only": False, "evaluation.centralized": "off",
    }  # fmt: skip
    bench = Bench(common, str(shared.model), private, [0], tmp_path / "runs")
    rows = Rows(tmp_path / "rows.csv", ALLOCATION.keys, ALLOCATION.figures, {})
    ALLOCATION.work(bench, rows)  # type: ignore[arg-type]
    found = {row["model"]: row for row in rows.rows}
    assert found.keys() == {"dense", "bandits", "schedule", "FedPETuning"}
    (run,) = (tmp_path / "runs" / "0-0.3-bandits" / "runs").iterdir()
    document = json.loads((run / "summary.json").read_text())
    told = [client["metrics"]["perplexity/public/federated"] for client in document["clients"]]
    assert float(found["bandits"]["perplexity"]) == pytest.approx(fmean(told), rel=1e-5)
    assert float(found["bandits"]["worst"]) == pytest.approx(max(told), rel=1e-5)
    assert float(found["bandits"]["virtual_seconds"]) == pytest.approx(document["virtual_seconds"], rel=1e-5)
    assert (found["FedPETuning"]["virtual_seconds"], found["FedPETuning"]["pruned"]) == ("", "")
    number = len(rows.rows)
    ALLOCATION.work(bench, rows)  # type: ignore[arg-type]
    assert len(rows.rows) == number
    conditions = {
        "model": {"name": "tiny", "weights": 1},
        "windows": 2,
        "window_tokens": 16,
        "texts": {"public": {"windows": 2}},
    }
    write_report(ALLOCATION, rows, conditions, tmp_path / "rows")
    assert "bandits − schedule" in (tmp_path / "rows.md").read_text()
