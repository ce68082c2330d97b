"""Tracking tools: what the server records, and that a run never depends on it.

The tests of a tool are skipped if its package is not installed.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from espalier.errors import InputError
from espalier.settings.run import of_the_result
from server_app.tracking.run_tracking import between_rounds, known
from tests.bench import Bench, model_files

TOOLS = ("tensorboard", "trackio", "wandb", "mlflow")
SETTINGS = {
    "federation.rounds": 2,
    "training.steps": 1,
    "lora.rank": 2,
    "evaluation.every": 1,
}
NAME = "perplexity/public/federated"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedpetuning", SETTINGS, num_clients=2)


@dataclass
class Recorder:
    """Tracking tool that keeps what it gets, and fails in the methods that ``fails`` names."""

    fails: tuple[str, ...] = ()
    folder: Path | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    logged: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    finished: list[tuple[int, Mapping[str, float], bool]] = field(default_factory=list)

    def open(self, _: str, folder: Path, parameters: Mapping[str, Any]) -> "Recorder":
        self._may_fail("open")
        self.folder = folder
        self.parameters = parameters
        return self

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._may_fail("log")
        self.logged.append((step, figures))

    def finish(self, figures: Mapping[str, float], step: int, *, completed: bool) -> None:
        self._may_fail("finish")
        self.finished.append((step, figures, completed))

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"no {what}")


def recorded(monkeypatch: pytest.MonkeyPatch, *fails: str) -> Recorder:
    """Let runs write to a recorder, with every tool installed."""
    recorder = Recorder(fails)
    monkeypatch.setattr("server_app.tracking.run_tracking.open_tracker", recorder.open)
    monkeypatch.setattr("espalier.settings.libraries.find_spec", lambda _: True)
    return recorder


def summary(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return document


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == name]


def by_round(run: Path) -> list[float]:
    """Return the perplexity after each round, as ``rounds.json`` has it."""
    rounds = json.loads((run / "rounds.json").read_text())["rounds"]
    return [entry["perplexity"]["public"] for entry in rounds]


# ----- what is recorded ---------------------------------------------------------------------------


def test_settings_rounds_and_result_are_recorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorded(monkeypatch)
    statuses: list[str] = []
    grid = bench.grid()

    def look(_: Message) -> None:
        (run,) = bench.runs()
        statuses.append(summary(run)["status"])

    grid.before_push = look
    run = bench.run(grid, tracking="trackio")
    # A run at work says so, in ``summary.json`` too.
    assert set(statuses) == {"running"}
    document = summary(run)
    assert document["status"] == "completed"
    assert recorder.folder == run
    assert (recorder.parameters["method"], recorder.parameters["lora.rank"]) == ("fedpetuning", 2)
    assert not {"out-dir", "site-keys", "tracking"} & recorder.parameters.keys()
    rounds = {step: dict[str, float]() for step in (1, 2)}
    for step, figures in recorder.logged:
        rounds[step] |= figures
    assert [rounds[step][NAME] for step in (1, 2)] == by_round(run)
    assert all(rounds[step]["clients"] == 2 for step in (1, 2))
    assert 0 < rounds[1]["bytes_up"] < rounds[2]["bytes_up"]
    ((step, figures, completed),) = recorder.finished
    assert (step, completed) == (2, True)
    (metric,) = document["metrics"]
    assert figures[NAME] == metric["values"]["federated"]
    assert figures["perplexity/public/dense"] == metric["values"]["dense"]
    assert "perplexity/public/centralized" not in figures
    assert figures["parameters/federated"] == document["size"]["federated"]["parameters"]
    assert figures["bytes_up"] == document["bytes_up"]


def test_failed_run_is_closed_as_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch)
    bench.killed(
        lambda header: header.kind == "train" and header.server_round == 2, tracking="wandb"
    )
    assert [completed for _, _, completed in recorder.finished] == [False]


def test_mean_of_clients_is_recorded_between_rounds() -> None:
    details = {"round": 1, "perplexity": {"a": {"0": 2.0, "1": 4.0}, "b": {"0": None, "1": 1.0}}}
    assert dict(between_rounds(details, "text")) == {
        "perplexity/a/federated": 3.0,
        "perplexity/b/federated": None,
    }
    assert dict(between_rounds({"scores": {"acc": 0.5}}, "boolq")) == {"acc/boolq/federated": 0.5}


def test_figures_are_finite_under_plain_names() -> None:
    assert known({"perplexity/ä:b/dense": 1, "x": None, "y": float("nan")}) == {
        "perplexity/__b/dense": 1.0
    }
    assert of_the_result({"seed": 1, "out-dir": "x", "lora": {"rank": 2}}) == {
        "seed": 1,
        "lora.rank": 2,
    }


# ----- a run does not depend on it ----------------------------------------------------------------


@pytest.mark.parametrize("fails", ["open", "log", "finish"])
def test_failing_tool_is_reported_once_and_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    plain = bench.run()
    recorded(monkeypatch, fails)
    run = bench.run(tracking="mlflow")
    assert summary(run)["status"] == "completed"
    assert model_files(run) == model_files(plain)
    (event,) = events(run, "tracking_failed")
    assert event["text"] == (
        f"tracking     mlflow is off, the run goes on: RuntimeError: no {fails}"
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_missing_package_is_refused_before_anything_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setattr("espalier.settings.libraries.find_spec", lambda _: None)
    with pytest.raises(
        InputError, match=rf"tracking = '{tool}'.*pip install -c constraints.txt -e '\.\[{tool}\]'"
    ):
        bench.run(tracking=tool)
    assert not (bench.folder / "runs").exists()


def test_sites_have_no_part_in_it() -> None:
    root = Path(__file__).parents[2]
    files = [
        file for room in ("client_app", "pruning_kernels") for file in (root / room).rglob("*.py")
    ]
    files += [file for file in (root / "espalier").rglob("*.py") if "settings" not in file.parts]
    assert not [file for file in files if "settings.tracking" in file.read_text()]


# ----- the tools themselves -----------------------------------------------------------------------


def resumed(bench: Bench, tool: str) -> Path:
    """Run two rounds, interrupted after the first and resumed."""
    run = bench.killed(
        lambda header: header.kind == "train" and header.server_round == 2, tracking=tool
    )
    bench.run(bench.grid(), tracking=tool, resume_from=str(run))
    assert events(run, "tracking_failed") == []
    assert summary(run)["status"] == "completed"
    return run


def final(run: Path) -> float:
    (metric,) = summary(run)["metrics"]
    value: float = metric["values"]["federated"]
    return value


def test_tensorboard(bench: Bench) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run = resumed(bench, "tensorboard")
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    values = {event.step: event.value for event in found.Scalars(NAME)}
    assert values == pytest.approx({1: by_round(run)[0], 2: final(run)})
    assert "settings/text_summary" in found.Tags()["tensors"]
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    session = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert session.hparams["lora.rank"].number_value == 2


def test_trackio(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("trackio") is None:
        pytest.skip("could not import 'trackio'")
    # Trackio reads the variable when it is imported, so the test leaves the import to the run.
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    run = resumed(bench, "trackio")
    with sqlite3.connect(run.parent / "trackio" / "espalier.db") as database:
        rows = database.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", [run.name]
        ).fetchall()
        configs = database.execute(
            "SELECT config FROM configs WHERE run_name = ?", [run.name]
        ).fetchall()
    values = {step: figures[NAME] for step, text in rows if NAME in (figures := json.loads(text))}
    assert values == pytest.approx({1: by_round(run)[0], 2: final(run)})
    assert json.loads(configs[0][0])["lora.rank"] == 2


def test_wandb_offline(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = bench.run(tracking="wandb")
    assert events(run, "tracking_failed") == []
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert NAME.encode() in content
    assert b"lora.rank" in content


def test_mlflow_without_network(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    run = resumed(bench, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("espalier")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params["lora.rank"] == "2"
    history = client.get_metric_history(found.info.run_id, NAME)
    values = {metric.step: metric.value for metric in history}
    assert values == pytest.approx({1: by_round(run)[0], 2: final(run)})
