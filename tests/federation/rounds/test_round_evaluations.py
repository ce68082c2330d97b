"""Evaluations between rounds.

They equal the final evaluation of a run that ends there, also after a kill.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from tests.bench import Bench, summary

TRAINED = {
    "federation.rounds": 3, "training.steps": 2, "training.batch-size": 2,
    "training.learning-rate": 0.01, "lora.rank": 2, "evaluation.max-samples": 4,
}  # fmt: skip
FEDSPINE = {
    "lora.targets": "all",
    "pruning.ratio": 0.25,
    "evaluation.local-baseline": True,
}


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    method = getattr(request, "param", "fedpetuning")
    return Bench(tmp_path, method, TRAINED | (FEDSPINE if method == "fedspine" else {}))


def looks(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "rounds.json").read_text())["rounds"]
    return found


def test_evaluations_equal_the_ends_of_shorter_runs(bench: Bench) -> None:
    found = looks(bench.run(evaluation__every=1, training__schedule="constant"))
    assert [look["round"] for look in found] == [1, 2, 3]
    for look in found:
        shorter = bench.run(federation__rounds=look["round"], training__schedule="constant")
        (metric,) = summary(shorter)["metrics"]
        assert look["perplexity"] == {
            metric["dataset"]: pytest.approx(metric["values"]["federated"], rel=1e-6)
        }


def test_evaluations_are_the_same_after_kill(bench: Bench) -> None:
    changes = {"evaluation__every": 2, "federation__rounds": 5}
    whole = bench.run(**changes)
    assert [look["round"] for look in looks(whole)] == [2, 4]
    killed = bench.killed(
        lambda header: header.kind == "train" and header.server_round == 4, **changes
    )
    assert looks(bench.run(resume_from=str(killed), **changes)) == looks(whole)


def test_without_it_nothing_is_written(bench: Bench) -> None:
    assert not (bench.run() / "rounds.json").exists()


@pytest.mark.parametrize("bench", ["fedspine"], indirect=True)
def test_every_device_s_own_model_is_measured(bench: Bench) -> None:
    """The server builds the devices' models from cuts and adapters.

    Its metrics are those that the devices report.
    """
    folder = bench.run(evaluation__every=3)
    (look,) = looks(folder)
    told = {
        str(client["client"]): client["metrics"]["perplexity/public/federated"]
        for client in summary(folder)["clients"]
    }
    assert look["perplexity"]["public"] == pytest.approx(told, rel=1e-3)
    assert look["seconds"] == summary(folder)["virtual_seconds"]


@pytest.mark.parametrize("bench", ["sft-p"], indirect=True)
def test_impossible_looks_are_refused_at_once(bench: Bench) -> None:
    with pytest.raises(
        EspalierError,
        match=r"evaluation.every = 1: sft-p is evaluated only at the end; set it to 0",
    ):
        bench.run(evaluation__every=1)
    assert not (bench.folder / "runs").exists()
