"""Measurements of models: tiny ones, whose figures are compared with what is known of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from espalier.errors import InputError
from espalier.results.finished_run import open_run
from espalier.results.measured_model import measured
from espalier.results.report import after_run
from espalier.results.report.page import report_page
from espalier.results.speed import FILE, PROCESS, measure, measured_rows
from tests.bench import Bench, Home, home
from tests.tiny_model import save_tiny_llama, save_tiny_roberta

FEW = {"prompt_tokens": 8, "new_tokens": 3, "repetitions": 1, "batch_size": 1}


MODEL: dict[str, Any] = {
    "model_memory": 5e8, "peak_memory": 9e8, "load_seconds": 1.25,
    "prompt_tokens_per_second": 1234.5, "new_tokens_per_second": None, "dtype": "bfloat16",
    "parameters": 10,
}  # fmt: skip
"""Figures of a model."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))


def figures_of(**paths: Path) -> dict[str, Any]:
    return measured(FEW | {key: str(path) for key, path in paths.items()})


def parameters(path: Path) -> int:
    return int(AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).num_parameters())


def test_decoder_writes_tokens(shared: Home) -> None:
    figures = figures_of(model=shared.model)
    assert figures["parameters"] == parameters(shared.model)
    assert figures["dtype"] == "bfloat16"
    for name in ("prompt_tokens_per_second", "load_seconds", "peak_memory"):
        assert figures[name] > 0


def test_encoder_writes_none(tmp_path: Path) -> None:
    encoder = save_tiny_roberta(tmp_path / "encoder")
    AutoModelForSequenceClassification.from_pretrained(encoder).save_pretrained(encoder)
    assert figures_of(model=encoder)["new_tokens_per_second"] is None


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("flap", {"pruning.ratio": 0.4}),
        ("fedpetuning", {"training.steps": 1, "federation.rounds": 1, "lora.rank": 2}),
    ],
)
def test_results_of_runs_are_loaded(
    tmp_path: Path, shared: Home, method: str, settings: dict[str, Any]
) -> None:
    """The model of a directory is built without running code that lies in it."""
    folder = Bench(tmp_path, method, settings, num_clients=2, home=shared).run()
    run = open_run(folder)
    if run.model is not None:
        (run.model / "modeling_structured.py").write_text("raise SystemExit")
        figures = figures_of(model=run.model)
        assert figures["parameters"] == run.summary["size"]["federated"]["parameters"]
    else:
        assert run.adapter is not None
        figures = figures_of(model=shared.model, adapter=run.adapter)
        added = run.summary["size"]["federated"]["parameters"]
        assert figures["parameters"] == parameters(shared.model) + added
    assert figures["new_tokens_per_second"] is None or figures["new_tokens_per_second"] > 0


def test_other_base_is_refused(tmp_path: Path, shared: Home) -> None:
    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    other = save_tiny_llama(tmp_path / "other", seed=1)
    settings = (folder / "settings.toml").read_text()
    (folder / "settings.toml").write_text(settings.replace(str(shared.model), str(other)))
    with pytest.raises(InputError, match="does not have the hash"):
        measure(open_run(folder))


def test_figures_are_on_the_page(tmp_path: Path, shared: Home) -> None:
    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    run = open_run(folder)
    assert measured_rows(run) == {}
    assert "espalier report --measure" in report_page(run)
    document = FEW | {"threads": 1, "machine": "x86", "models": [{"name": "dense", **MODEL}]}
    (folder / FILE).write_text(json.dumps(document))
    page = report_page(run)
    assert "<td>1,234.5</td>" in page
    assert "bfloat16, 1 CPU threads, x86." in page
    assert "--measure" not in page


def test_models_are_measured_at_the_end_of_a_run(
    tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    monkeypatch.setattr("espalier.results.speed.measured_apart", lambda *_: dict(MODEL))
    assert after_run.main({"directory": str(folder)}) == 0
    models = json.loads((folder / FILE).read_text())["models"]
    assert [model["name"] for model in models] == ["dense", "federated"]
    assert "<td>1,234.5</td>" in (folder / "report.html").read_text()


def test_the_measuring_process_ends_with_its_parent(shared: Home) -> None:
    reading, writing = os.pipe()
    # As at the end of the process that holds it.
    os.close(writing)
    request = FEW | {"model": str(shared.model), "threads": 1, "parent": reading}
    done = subprocess.run(
        [sys.executable, "-P", "-m", PROCESS],
        input=json.dumps(request),
        pass_fds=(reading,),
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(reading)
    assert (done.returncode, done.stdout) == (1, "")


def test_one_of_the_models_of_clients_is_measured(
    tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"training.steps": 2, "federation.rounds": 2, "lora.rank": 2, "lora.targets": "all"}
    folder = Bench(tmp_path, "fedspine", settings, num_clients=2, home=shared).run()
    monkeypatch.setattr("espalier.results.speed.measured_apart", lambda *_: dict(MODEL))
    run = open_run(folder)
    for most, names in ((1, ["node-00000"]), (None, ["node-00000", "node-00001"])):
        measure(run, max_clients=most)
        models = json.loads((folder / FILE).read_text())["models"]
        assert [model["name"] for model in models] == ["dense", *names]


def test_model_that_may_not_fit_is_not_loaded(
    tmp_path: Path,
    shared: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    monkeypatch.setattr(after_run, "machine_memory", lambda: (1 << 40, 1 << 29))
    assert after_run.main({"directory": str(folder)}) == 0
    assert "speed: base model and libraries need 1.07 GB" in capsys.readouterr().out
    assert not (folder / FILE).exists()


def test_run_stays_complete_if_a_model_cannot_be_measured(
    tmp_path: Path,
    shared: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("cannot be measured")

    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    monkeypatch.setattr("espalier.results.speed.measured_apart", refuse)
    assert after_run.main({"directory": str(folder)}) == 0
    assert "not measured memory and speed: cannot be measured" in capsys.readouterr().out


@pytest.mark.slow
def test_each_model_is_measured_in_its_own_process(tmp_path: Path, shared: Home) -> None:
    folder = Bench(tmp_path, "flap", {"pruning.ratio": 0.4}, num_clients=2, home=shared).run()
    run = open_run(folder)
    measure(run)
    models = json.loads((folder / FILE).read_text())["models"]
    assert [model["name"] for model in models] == ["dense", "federated"]
    assert models[0]["parameters"] > models[1]["parameters"]
    assert run.model is not None
    (run.model / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be measured"):
        measure(run)


def test_code_of_the_family_is_imported_before_the_measurement(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    program = (
        "import sys; from pathlib import Path; from espalier.results.sources import Source;"
        " from espalier.results.use.loading import loader_of;"
        f" loader_of(Source('', Path({str(base)!r})));"
        " sys.exit('transformers.models.llama.modeling_llama' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_models_take_turns_and_the_best_figures_count(
    tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy for the first two measurements and for the last one."""
    folder = Bench(tmp_path, "flap", {}, num_clients=2, home=shared).run()
    measured_models = []
    speeds = iter([1.0, 2.0, 50.0, 60.0, 40.0, 3.0])

    def measured_apart(paths: dict[str, Path], *_: Any) -> dict[str, Any]:
        measured_models.append(paths["model"])
        speed = next(speeds)
        written = None if speed == 50.0 else speed
        return MODEL | {
            "prompt_tokens_per_second": speed, "new_tokens_per_second": written,
            "load_seconds": 1 / speed,
        }  # fmt: skip

    monkeypatch.setattr("espalier.results.speed.measured_apart", measured_apart)
    measure(open_run(folder))
    assert measured_models == [shared.model, folder / "model"] * 3
    dense, federated = json.loads((folder / FILE).read_text())["models"]
    assert (dense["prompt_tokens_per_second"], dense["new_tokens_per_second"]) == (50.0, 40.0)
    assert (federated["prompt_tokens_per_second"], federated["load_seconds"]) == (60.0, 1 / 60)
