"""The study of smaller models runs the app, tunes its results, and resumes after a stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting.perplexity_report import write_report
from benchmarks.reporting.rows import Rows
from benchmarks.smaller import studies
from benchmarks.smaller.bench import Bench
from benchmarks.smaller.studies import STUDIES
from benchmarks.smaller.times import write_times
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from tests.bench import home, private_text

CONDITIONS: dict[str, Any] = {
    "model": {"name": "tiny", "weights": 1}, "samples": 2, "sequence_length": 16,
    "texts": {"public": {"samples": 2}}
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    monkeypatch.setattr(
        studies, "METHODS", {name: studies.METHODS[name] for name in ("FLAP", "FedPrLLM")}
    )
    monkeypatch.setattr(studies, "SHARES", (0.3,))
    monkeypatch.setattr(studies, "SAMPLES", 2)
    monkeypatch.setattr(studies, "PROMPT", 16)
    short = {
        "federation.rounds": 1,
        "training.steps": 1,
        "training.batch-size": 1,
        "data.sequence-length": 16,
        "lora.rank": 2,
    }
    monkeypatch.setattr(studies, "TUNING", studies.TUNING | short)
    shared = home(tmp_path / "home")
    for client in range(2):
        (tmp_path / f"{client}.txt").write_text(private_text(client))
    common = {
        "model": str(shared.model), "threads": 1, "data.sequence-length": 16,
        "evaluation.texts": f"public={shared.public}", "evaluation.sequence-length": 16,
        "evaluation.max-samples": 2, "evaluation.local-baseline": False,
        "evaluation.centralized": "off", "deadline-seconds": 60.0,
    }  # fmt: skip
    return Bench(
        common,
        str(shared.model),
        [tmp_path / f"{client}.txt" for client in range(2)],
        [0],
        tmp_path / "work",
    )


def test_selections_are_those_of_the_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("FLAP, block", "FLAP, kind")
    monkeypatch.setattr(studies, "SELECTED", {name: studies.SELECTED[name] for name in names})
    study = STUDIES["selections"]
    rows = Rows(tmp_path / "smaller-selections.csv", study.keys, study.figures, CONDITIONS)
    studies.selections(bench, rows)
    assert [row["model"] for row in rows.rows] == ["dense", *names]
    for name in names:
        (run,) = (bench.work / f"0-0.3-{name}" / "runs").iterdir()
        assert f'selection = "{name.partition(", ")[2]}"' in (run / "settings.toml").read_text()
    # What was measured is not measured again.
    studies.selections(bench, rows)
    assert len(rows.rows) == 3


def test_every_method_is_measured_plain_and_tuned(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = STUDIES["recovery"]
    path = tmp_path / "out" / "smaller-recovery"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    studies.recovery(bench, rows)
    found = {row["model"]: row for row in rows.rows}
    pruned = ["FLAP", "FLAP, tuned", "FedPrLLM", "FedPrLLM, tuned"]
    assert list(found) == ["dense", "dense, tuned", *pruned]
    (run,) = (bench.work / "0-0.3-FLAP, tuned" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert float(found["FLAP, tuned"]["perplexity"]) == pytest.approx(
        summary["metrics"][0]["values"]["federated"], rel=1e-5
    )
    small = OpenedModel(run / "model").plan.num_parameters
    assert float(found["FLAP"]["million_parameters"]) == pytest.approx(small / 1e6, rel=1e-5)
    assert float(found["FedPrLLM"]["million_parameters"]) == float(
        found["dense"]["million_parameters"]
    )
    assert float(found["FLAP, tuned"]["megabytes_up"]) > float(found["FLAP"]["megabytes_up"]) > 0

    monkeypatch.setattr(
        "benchmarks.smaller.bench.run_method", lambda *_: pytest.fail("a cell was measured twice")
    )
    again = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    studies.recovery(bench, again)
    assert again.rows == rows.rows
    write_report(study, again, CONDITIONS, path)
    assert "| FLAP, tuned |" in path.with_suffix(".md").read_text()

    times = Rows(
        tmp_path / "smaller-latency.csv",
        studies.KEYS,
        STUDIES["latency"].figures,
        CONDITIONS | {"threads": 1},
    )
    studies.latency(bench, times)
    assert {row["model"] for row in times.rows} == {"dense", "FLAP", "FedPrLLM"}
    assert all(float(row["prefill_ms"]) > 0 for row in times.rows)
    write_times("times", times, tmp_path / "smaller-latency")
    assert (tmp_path / "smaller-latency.md").read_text().count("\n| ") == 4


def test_run_of_other_settings_is_not_reused(bench: Bench) -> None:
    folder = bench.work / "0-run"
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "summary.json").write_text('{"status": "completed"}')
    with pytest.raises(
        EspalierError, match="of which nobody knows what it was asked for; give another --work"
    ):
        bench.run("0-run", {"seed": 0})
    asked = {**bench.common, "seed": 0, "enrol-seconds": 600.0}
    (folder / "asked.json").write_text(json.dumps(asked))
    assert bench.run("0-run", {"seed": 0}) == bench.made("0-run") == folder / "runs" / "a"
    with pytest.raises(
        EspalierError, match=r"0-run: holds a run with another seed, threads; give another --work"
    ):
        bench.run("0-run", {"seed": 1, "threads": 2})
    with pytest.raises(EspalierError, match="holds no completed run"):
        bench.made("1-run")
