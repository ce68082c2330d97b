"""Tuning of pruned models.

Zeros stay zero if the settings say so, and the evaluated model is the written one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.models.adapters import adapter_plan
from espalier.settings.run import parse
from espalier.training.adapted_model import AdaptedModel
from tests.bench import Bench, home, summary
from tests.federation.tasks.task_runs import bench_of, metric, reviews

CPU = Computing(torch.device("cpu"), torch.float32, 1)
TUNED: dict[str, Any] = {
    "federation.rounds": 1, "training.steps": 3, "training.learning-rate": 0.05, "lora.rank": 2,
    "lora.targets": "all", "lora.merge": True, "evaluation.max-samples": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run two pruning methods and return their run directories."""
    folder = tmp_path_factory.mktemp("pruned")
    methods = {"fedprllm": {"pruning.sparsity": 0.5}, "flap": {"pruning.ratio": 0.3}}
    found = {}
    for method, settings in methods.items():
        (folder / method).mkdir()
        found[method] = Bench(folder / method, method, settings).run()
    return found


def perplexity(folder: Path, text: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    ).eval()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"])
    samples = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        losses = [
            model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
        ]
    return float(np.exp(np.mean(losses)))


def zeros_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model" / "model.safetensors")
    return {
        name: value == 0
        for name, value in tensors.items()
        if ".layers." in name and value.dim() == 2
    }


@pytest.mark.parametrize("method", ["fedpetuning", "hetlora"])
@pytest.mark.parametrize("keep", [True, False])
def test_zeros_of_pruned_model_stay_on_request(
    tmp_path: Path, pruned: dict[str, Path], method: str, keep: bool
) -> None:
    """Only the merged model is written then, and it has the reported perplexity."""
    more = {"lora.ranks": "1,2"} if method == "hetlora" else {}
    bench = Bench(
        tmp_path, method, TUNED | more | {"model": str(pruned["fedprllm"]), "lora.keep-zeros": keep}
    )
    folder = bench.run()
    before = zeros_of(pruned["fedprllm"])
    after = zeros_of(folder)
    assert all(zeros.float().mean() >= 0.5 for zeros in before.values())
    for name, zeros in before.items():
        assert torch.equal(after[name], zeros) == keep
    assert (folder / "adapter").exists() != keep
    (metric,) = summary(folder)["metrics"]
    assert metric["values"]["federated"] == pytest.approx(
        perplexity(folder / "model", bench.public), rel=1e-3
    )
    assert metric["values"]["federated"] != pytest.approx(metric["values"]["dense"], rel=1e-3)


def test_tuned_smaller_model_stays_as_small(tmp_path: Path, pruned: dict[str, Path]) -> None:
    bench = Bench(tmp_path, "fedpetuning", TUNED | {"model": str(pruned["flap"])})
    folder = bench.run()
    small = open_model(str(pruned["flap"]))
    tuned = OpenedModel(folder / "model")
    assert (tuned.plan, tuned.structure) == (small.plan, small.structure)
    (metric,) = summary(folder)["metrics"]
    assert metric["values"]["dense"] == pytest.approx(
        perplexity(pruned["flap"] / "model", bench.public), rel=1e-3
    )
    assert metric["values"]["federated"] == pytest.approx(
        perplexity(folder / "model", bench.public), rel=1e-3
    )


def test_a_smaller_model_is_tuned_for_a_task(
    tmp_path: Path, pruned: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller model evaluates the items before tuning, the tuned one afterwards."""
    for name in ("client_text", "client_items"):
        monkeypatch.setattr(f"espalier.data.{name}.MIN_PREDICTIONS", 3)
    monkeypatch.setattr("espalier.data.client_items.MIN_ITEMS", 3)
    bench = bench_of(tmp_path, "sst2", reviews, model=str(pruned["flap"]))
    document = summary(bench.run())
    loss = metric(document, "loss")["values"]
    assert loss["federated"] < loss["dense"]
    assert metric(document, "acc")["values"]["federated"] is not None
    assert {client["status"] for client in document["clients"]} == {"completed"}


def test_a_smaller_model_is_pruned_again(tmp_path: Path, pruned: dict[str, Path]) -> None:
    """A smaller model is pruned with masks, and by groups a second time.

    The latter gives a structure of a structure.
    """
    masked = Bench(tmp_path, "fedprllm", {"model": str(pruned["flap"])}).run()
    assert OpenedModel(masked / "model").structure == open_model(str(pruned["flap"])).structure
    assert summary(masked)["sparsity"]["achieved"] == pytest.approx(0.5, abs=0.02)
    twice = Bench(tmp_path, "flap", {"model": str(pruned["flap"]), "pruning.ratio": 0.2}).run()
    once = open_model(str(pruned["flap"]))
    assert OpenedModel(twice / "model").plan.num_parameters < once.plan.num_parameters


@torch.no_grad()
def test_masked_pass_equals_masked_matrix(tmp_path: Path) -> None:
    """The reference is the product of the factors, masked and added to the weight."""
    shared = home(tmp_path)
    opened = OpenedModel(shared.model)
    settings = parse(
        {"method": "fedpetuning", "lora.merge": True, "lora.keep-zeros": True, "lora.rank": 2}
    )
    adapters = adapter_plan(opened.plan, settings.lora)
    adapted = AdaptedModel.load(opened, CPU, settings, adapters)
    plain = AdaptedModel.load(opened, CPU, settings, adapters)
    for model in (adapted, plain):
        for block in model.parameters.values():
            for name, parameter in block.items():
                torch.manual_seed(len(name))
                parameter.copy_(torch.randn_like(parameter))
    linear = plain.whole.model.layers[1].self_attn.q_proj
    linear.base_layer.weight[3, :5] = 0
    adapted.whole.model.layers[1].self_attn.q_proj.base_layer.weight[3, :5] = 0
    zeros = linear.base_layer.weight == 0
    module = adapted.whole.model.layers[1].self_attn.q_proj
    # The mask that the module holds is that of the file, which has no zeros.
    module.forward.args[1].copy_(zeros)
    update = 8.0 * (linear.lora_B["default"].weight @ linear.lora_A["default"].weight)
    inputs = torch.randn(2, 3, 16)
    expected = inputs @ (linear.base_layer.weight + update.masked_fill(zeros, 0)).T
    found = module(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_adapters_alone_would_fill_the_zeros() -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"lora\.keep-zeros = true: adapters alone would fill the zeros of the base; set it to"
            " false, or merge to true"
        ),
    ):
        parse({"method": "fedpetuning", "lora.keep-zeros": True})
