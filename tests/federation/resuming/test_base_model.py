"""Runs on a damaged base model, and failed runs.

A damaged base model ends the run before clients enrol. A failed run leaves no files that look like
a result.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import EspalierError
from server_app.artifacts.outcome import Outcome
from tests.bench import Bench
from tests.in_process import InProcessGrid

PRUNED = {"pruning.sparsity": 0.5}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def spoil(bench: Bench, name: str, value: float) -> None:
    path = bench.model / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[7] = value
    save_file(tensors, path, {"format": "pt"})


def asked(grid: InProcessGrid) -> list[object]:
    """Return a list that collects the messages that leave the server."""
    sent: list[object] = []
    grid.before_push = sent.append
    return sent


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"],
)
def test_nan_weight_ends_run_before_any_order(tmp_path: Path, name: str) -> None:
    bench = Bench(tmp_path, "fedprllm", PRUNED, num_clients=2)
    spoil(bench, name, math.nan)
    grid = bench.grid()
    sent = asked(grid)
    with pytest.raises(EspalierError, match=rf"tensor {name} contains NaN"):
        bench.run(grid)
    assert not sent
    assert not (tmp_path / "runs").exists()


def test_float16_overflow_ends_a_run_at_once(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        "fedprllm",
        {"pruning.metric": "magnitude", "dtype": "float16"},
        num_clients=2,
    )
    spoil(bench, "model.layers.1.mlp.down_proj.weight", 1e6)
    with pytest.raises(
        EspalierError,
        match=(
            r"down_proj.weight contains .* 'float16' overflows beyond 65504;"
            r" set dtype to 'float32'"
        ),
    ):
        bench.run()


def test_stored_head_overrides_tied_flag(tmp_path: Path) -> None:
    """The dense metric is that of the directory, the result's that of the written files.

    Both are computed with plain transformers.
    """
    bench = Bench(
        tmp_path,
        "fedprllm",
        PRUNED | {"evaluation.max-samples": 1000},
        num_clients=2,
    )
    path = bench.model / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, path, {"format": "pt"})
    folder = bench.run()
    (metric,) = summary(folder)["metrics"]
    for column, directory in (("dense", bench.model), ("federated", folder / "model")):
        assert metric["values"][column] == pytest.approx(
            perplexity(directory, bench.public), rel=1e-3
        )


def perplexity(directory: Path, text: Path) -> float:
    """Return the perplexity over all sequences of a text."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(directory)(text.read_text())["input_ids"])
    samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        losses = [
            model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
        ]
    return math.exp(sum(losses) / len(losses))


def test_nan_evaluation_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run that succeeds leaves only its own result."""
    bench = Bench(tmp_path, "fedprllm", PRUNED, num_clients=2)
    measure = Outcome.losses_of
    with monkeypatch.context() as patch:
        patch.setattr(Outcome, "losses_of", lambda *_: {"public": math.nan})
        with pytest.raises(
            EspalierError, match=r"evaluation of the federated model on public gives NaN"
        ):
            bench.run()
    (folder,) = bench.runs()
    document = summary(folder)
    assert document["status"] == "failed"
    assert "gives NaN" in document["reason"]
    assert document["metrics"][0]["values"]["federated"] is None
    assert not (folder / "model").exists()
    assert (folder / "failed-model" / "model.safetensors").exists()
    assert Outcome.losses_of is measure
    assert bench.run(resume_from=str(folder)) == folder
    assert summary(folder)["status"] == "completed"
    assert (folder / "model").exists()
    assert not (folder / "failed-model").exists()
