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
from benchmarks.fedspine.curves import common_targets, seconds_of_shared, seconds_to, write_curves
from benchmarks.smaller.bench import Bench
from espalier.modeling.opened import OpenedModel
from espalier.settings.mistakes import Mistake
from espalier.settings.run import parse
from espalier.wire.adapters import adapter_plan
from strategies.methods.refining_time import fleet_of


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
    short = {"lora.rank": 4, "federation.rounds": 2, "training.steps": 2, "data.window-tokens": 16, "evaluation.every": 1}
    monkeypatch.setattr(allocation, "TRAINED", allocation.TRAINED | short)
    spared = {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0}
    monkeypatch.setattr(allocation, "CUT_FIRST", allocation.CUT_FIRST | spared)
    cuts_last = {name: (run, how | spared) for name, (run, how) in allocation.CUTS_LAST.items()}
    monkeypatch.setattr(allocation, "CUTS_LAST", cuts_last)
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
    assert found.keys() == {
        "dense",
        "bandits",
        "schedule",
        "FedPETuning",
        "LLM-Pruner, then FedPETuning",
        allocation.PRUNED_LAST,
        allocation.REFINED_LAST,
    }
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
    curve = allocation.curves_of(rows)
    assert len(curve.rows) == 4 * 2
    last = {row["model"]: row for row in curve.rows if row["round"] == "2"}
    assert float(last["bandits"]["perplexity"]) == pytest.approx(fmean(told), rel=1e-3)
    assert float(last["bandits"]["seconds"]) == pytest.approx(document["virtual_seconds"], rel=1e-5)
    assert float(last["LLM-Pruner, then FedPETuning"]["seconds"]) < float(last["FedPETuning"]["seconds"])
    write_curves(curve, tmp_path / "rows-curves")
    assert "| FedPETuning | " in (tmp_path / "rows-curves.md").read_text()


def test_the_common_perplexity_and_when_it_is_reached() -> None:
    """Without pruning 10 is reached, with bandits 12 at best, by chance 11: all come to 12."""
    given = [
        ("0.0", "FedPETuning", 5, 30.0, 12.0), ("0.0", "FedPETuning", 10, 60.0, 10.0), ("0.5", "bandits", 5, 8.0, 14.0),
        ("0.5", "bandits", 10, 15.0, 12.0), ("0.5", "chance", 5, 20.0, 11.0), ("0.5", "chance", 10, 50.0, 13.0),
    ]  # fmt: skip
    names = ("sparsity", "model", "round", "seconds", "perplexity")
    rows = [{"seed": "0", **{name: str(value) for name, value in zip(names, own, strict=True)}} for own in given]
    assert common_targets(rows) == {("0", "0.5"): 12.0}
    assert [seconds_to(rows, "0", "0.5", model, 12.0) for model in ("FedPETuning", "bandits", "chance")] == [30, 15, 20]
    assert seconds_to(rows, "0", "0.5", "bandits", 11.9) is None


def test_times_of_a_shared_model_are_those_of_its_devices(tmp_path: Path) -> None:
    """Per token 4 operations for a frozen parameter, 6 for a trained one; the slowest device counts; no way down at first."""
    model = home(tmp_path).model
    settings = parse(
        {
            "method": "fedpetuning", "model": str(model), "num-clients": 3, "federation.rounds": 2, "training.steps": 5,
            "training.batch-size": 2, "data.window-tokens": 16, "lora.rank": 4,
        }
    )  # fmt: skip
    fleet = fleet_of("low")
    assert fleet is not None
    plan = OpenedModel(model).plan
    trained = adapter_plan(plan, settings.lora).num_parameters
    expected = []
    for number in (1, 2):
        seconds = []
        for client in range(3):
            conditions = fleet.drawn(settings.seed, client, number)
            computing = 5 * 2 * 16 * (4 * plan.num_parameters + 6 * trained) / conditions.operations_per_second
            seconds.append(computing + 8 * 4 * trained * number / conditions.bits_per_second)
        expected.append(sum(expected[-1:]) + max(seconds))
    assert seconds_of_shared(settings, fleet) == pytest.approx(expected)
