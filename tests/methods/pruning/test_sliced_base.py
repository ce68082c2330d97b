"""Sliced models as base of other methods."""

from pathlib import Path

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel, open_model
from tests.bench import Bench, summary
from tests.federation.tasks.test_recovery import TUNED, perplexity
from tests.methods.pruning.test_slicegpt import SMALL


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Execute a run and return its directory."""
    folder = tmp_path_factory.mktemp("sliced")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
        return Bench(folder, "slicegpt", SMALL).run()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))


def test_sliced_model_is_tuned_by_federated_lora(tmp_path: Path, sliced: Path) -> None:
    """The merged model is sliced too and has the reported perplexity."""
    bench = Bench(tmp_path, "fedpetuning", TUNED | {"model": str(sliced)})
    folder = bench.run()
    small = open_model(str(sliced))
    tuned = OpenedModel(folder / "model")
    assert (tuned.plan, tuned.config["model_type"]) == (small.plan, "sliced-llama")
    assert (folder / "model" / "modeling_sliced.py").exists()
    (metric,) = summary(folder)["metrics"]
    assert metric["values"]["dense"] == pytest.approx(
        perplexity(sliced / "model", bench.public), rel=1e-3
    )
    assert metric["values"]["federated"] == pytest.approx(
        perplexity(folder / "model", bench.public), rel=1e-3
    )
    assert metric["values"]["federated"] != pytest.approx(metric["values"]["dense"], rel=1e-3)
    # LoRA does not change these weights.
    for name in ("attn_shortcut", "input_layernorm"):
        path = f"model.layers.1.{name}.weight"
        assert torch.equal(tuned.checkpoint.read(path), small.checkpoint.read(path))


def test_sliced_model_is_pruned_to_zeros(tmp_path: Path, sliced: Path) -> None:
    folder = Bench(tmp_path, "fedprllm", {"model": str(sliced)}).run()
    assert OpenedModel(folder / "model").plan == open_model(str(sliced)).plan
    assert summary(folder)["sparsity"]["achieved"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("method", ["flap", "llm-pruner", "llm-streamline", "sft-p", "slicegpt"])
def test_structured_methods_refuse_sliced_models(tmp_path: Path, sliced: Path, method: str) -> None:
    more = {
        "llm-pruner": {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0},
        "sft-p": {"lora.rank": 2},
    }
    bench = Bench(tmp_path, method, {"model": str(sliced), **more.get(method, {})})
    with pytest.raises(EspalierError, match=r"model_type = 'sliced-llama': .*name "):
        bench.run()
    assert not (tmp_path / "runs").exists()
