"""Comparison of tuning methods on a task: rows of runs, and the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from benchmarks.task_runs import arms
from benchmarks.task_runs.energy import rows_beside
from benchmarks.task_runs.report import write_report
from benchmarks.task_runs.study import FIGURES, KEYS, measure_arms
from espalier.settings.run import parse
from tests.bench import home, private_text
from tests.data.tasks.task_records import RECORDS

CONDITIONS = {"model": {"name": "tiny"}}
ARMS = ("FedPETuning", "LLM-Pruner, FedPETuning, 20%", "HetLoRA")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    shared = home(tmp_path / "home")
    for name, place in (("records", "harbour"), ("tests", "engine")):
        record = {**RECORDS["boolq"], "passage": f"the {place}"}
        lines = [json.dumps({**record, "answer": bool(n % 2)}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    pruned = arms.ARMS[ARMS[1]]
    short = {"data.sequence-length": 16, "data.num-samples": 2, "evaluation.sequence-length": 16}
    short |= {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0}
    monkeypatch.setitem(arms.ARMS, ARMS[1], replace(pruned, first=pruned.first | short))
    ranked = {"method": "hetlora", "lora.ranks": "1,2"}
    monkeypatch.setitem(arms.ARMS, "HetLoRA", arms.Arm(ranked))
    short = {
        "federation.rounds": 1, "training.steps": 1, "training.batch-size": 1, "lora.rank": 2,
        "evaluation.sequence-length": 16, "evaluation.max-samples": 2,
        "task.max-tokens": 32, "task.max-test-tokens": 32, "task.max-test-items": 4,
    }  # fmt: skip
    common = {
        **arms.COMMON, **short, "model": str(shared.model), "num-clients": 2, "threads": 1,
        "data.source": "files", "data.path": str(tmp_path / "records.jsonl"), "task.name": "boolq",
        "task.test-path": str(tmp_path / "tests.jsonl"),
        "evaluation.texts": f"public={shared.public}",
    }  # fmt: skip
    private = [tmp_path / "records.jsonl"] * 2
    return Bench(common, str(shared.model), private, [0], tmp_path / "work")


def test_rows_are_the_scores_of_the_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "public.txt").write_text(private_text(0) + private_text(1))
    path = tmp_path / "out" / "task-runs-boolq"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, CONDITIONS)
    energy = rows_beside(path, CONDITIONS)
    measure_arms(bench, rows, str(tmp_path / "public.txt"), ARMS, {}, energy)
    found = {row["arm"]: row for row in rows.rows}
    assert list(found) == ["dense", "chance", "local baseline", *ARMS]
    (run,) = (bench.work / "0-FedPETuning" / "runs").iterdir()
    document = json.loads((run / "summary.json").read_text())
    (accuracy,) = (one["values"] for one in document["metrics"] if one["name"] == "acc")
    assert float(found["dense"]["acc"]) == pytest.approx(accuracy["dense"], rel=1e-5)
    alone = accuracy["local_baseline"]
    assert float(found["local baseline"]["acc"]) == pytest.approx(alone, rel=1e-5)
    assert float(found["FedPETuning"]["megabytes_up"]) == pytest.approx(
        document["bytes_up"] / 2e6, rel=1e-5
    )
    # The bytes of a smaller base are those of both runs.
    smaller = found[ARMS[1]]
    assert float(smaller["million_parameters"]) < float(found["FedPETuning"]["million_parameters"])

    monkeypatch.setattr(
        "benchmarks.smaller.bench.run_method", lambda *_: pytest.fail("an arm was measured twice")
    )
    again = Rows(path.with_suffix(".csv"), KEYS, FIGURES, CONDITIONS)
    measure_arms(bench, again, "", ARMS, {}, energy)
    assert again.rows == rows.rows
    write_report("boolq", again, CONDITIONS, path)
    text = path.with_suffix(".md").read_text()
    assert "| dense |" in text
    # One round; the larger rank is 2.
    assert [(row["arm"], row["round"], row["rank"]) for row in energy.rows] == [
        ("HetLoRA", "1", "1"), ("HetLoRA", "1", "2"),
    ]  # fmt: skip
    assert sum(float(row["share"]) for row in energy.rows) == pytest.approx(1, abs=1e-5)
    assert "| HetLoRA, 1 |" in text
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize("name", arms.ARMS)
def test_settings_of_every_arm_are_known_and_read(name: str) -> None:
    given = {"data.source": "files", "data.path": "records.jsonl", "num-clients": 4}
    task = {"task.name": "dolly", "task.test-path": "tests.jsonl", **arms.TASKS["dolly"]}
    arm = arms.ARMS[name]
    common = {**arms.COMMON, **given, **task}
    parse({**common, **arm.settings}, simulation=True, by_hand=arm.settings)
    parse({**given, **arm.first}, simulation=True, by_hand=arm.first)
