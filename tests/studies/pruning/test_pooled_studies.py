"""Studies of pooled pruning: masks bit by bit, and a quality study that resumes after a stop."""

import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pooled import claims, mask_runs, quality
from benchmarks.pooled.__main__ import main
from benchmarks.reporting.perplexity_report import write_report
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from tests.bench import home, private_text

CONDITIONS: dict[str, Any] = {
    "model": {"name": "tiny", "weights": 1}, "samples": 2, "sequence_length": 16,
    "texts": {"public": {"samples": 2}}
}  # fmt: skip


def _bench(folder: Path, clients: int) -> Bench:
    shared = home(folder / "home")
    files = [folder / f"{client}.txt" for client in range(clients)]
    for client, file in enumerate(files):
        file.write_text(private_text(client))
    common = {
        "model": str(shared.model), "threads": 1, "data.sequence-length": 16,
        "evaluation.texts": f"public={shared.public}", "evaluation.sequence-length": 16,
        "evaluation.max-samples": 2, "deadline-seconds": 60.0,
    }  # fmt: skip
    return Bench(common, str(shared.model), files, [0], folder / "work")


def test_quality_study_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    names = (quality.BLOCKS, "FedPrLLM", "FedSpaLLM")
    monkeypatch.setattr(quality, "METHODS", {name: quality.METHODS[name] for name in names})
    monkeypatch.setattr(quality, "SPARSITIES", (0.5,))
    monkeypatch.setattr(mask_runs, "SAMPLES", 2)
    bench = _bench(tmp_path, clients=2)
    study = quality.STUDY
    path = tmp_path / "out" / "pooled-quality"
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    quality.quality(bench, rows)  # type: ignore[arg-type]
    found = {row["model"]: row for row in rows.rows}
    federated = [quality.BLOCKS, "FedPrLLM", "FedSpaLLM"]
    models = [federated[0], *quality.BASELINES.values(), *federated[1:]]
    assert set(found) == {"dense", *models, *(f"{model}, 2:4" for model in models)}
    pooled = found[quality.BLOCKS]
    # The centralized baseline has the same masks.
    assert pooled["perplexity"] == found["centralized Wanda"]["perplexity"]
    assert float(pooled["megabytes_up"]) > 0
    assert found["centralized Wanda"]["megabytes_up"] == ""

    monkeypatch.setattr(
        "benchmarks.smaller.bench.run_method", lambda *_: pytest.fail("a cell was measured twice")
    )
    again = Rows(path.with_suffix(".csv"), study.keys, study.figures, CONDITIONS)
    quality.quality(bench, again)  # type: ignore[arg-type]
    assert again.rows == rows.rows
    write_report(study, again, CONDITIONS, path)
    assert "| pooled, block by block, 2:4 |" in path.with_suffix(".md").read_text()


def test_claims_of_a_lone_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one client, baselines have the masks of the federation, and scaling changes nothing."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", "")
    monkeypatch.setattr(claims, "SPARSITIES", (0.5,))
    # One client cannot cover all layers with half of them.
    monkeypatch.delitem(claims.METHODS, "FedSpaLLM, half of the layers")
    monkeypatch.setattr(mask_runs, "SAMPLES", 2)
    study = claims.STUDY
    rows = Rows(tmp_path / "mask-claims.csv", study.keys, study.figures, CONDITIONS)
    claims.claims(_bench(tmp_path, clients=1), rows)  # type: ignore[arg-type]
    found = {row["model"]: row["perplexity"] for row in rows.rows}
    assert set(found) == {"dense", *claims.METHODS, *claims.BASELINES["FedPrLLM"].values(),
                          *claims.BASELINES["FedSpaLLM"].values()}  # fmt: skip
    assert found["FedPrLLM"] == found["all text, Wanda"] == found["FedPrLLM, scaled"]
    assert found["FedSpaLLM"] == found["all text, SparseGPT"] == found["FedSpaLLM, plain mean"]
    # A client's loss has three decimals.
    for federated, alone in (("FedPrLLM", "Wanda"), ("FedSpaLLM", "SparseGPT")):
        loss = log(float(found[federated]))
        assert log(float(found[f"one client, {alone}"])) == pytest.approx(loss, abs=6e-4)


@pytest.mark.slow
def test_no_bit_differs_on_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All groups, metrics and weightings of the dense pass, on 3.2 million weights."""
    files = []
    for client in range(3):
        file = tmp_path / f"{client}.txt"
        file.write_text(private_text(client))
        files += ["--private", str(file)]
    sizes = ["--samples", "2", "--sequence-length", "64", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["", "exact", "--model", "demo", *files, *sizes])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert main() == 0
    page = (tmp_path / "out" / "pooled-exact-demo.md").read_text()
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| one-shot")]
    assert len(lines) == 16
    assert {(int(line[5].replace(",", "")), line[6].strip()) for line in lines} == {(3244032, "0")}


def test_too_short_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a short text")
    arguments = ["exact", "--model", "demo", "--private", str(tmp_path / "a.txt")]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    assert main() == 2
    assert "8 samples of 256 are needed" in capsys.readouterr().err
