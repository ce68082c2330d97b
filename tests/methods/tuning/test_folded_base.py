"""FedEx-LoRA and FLoRA: clients train over the base to which earlier updates are folded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from espalier.models.adapters import AdapterPlan
from espalier.models.plan import block_key
from espalier.training.adapter_training import AdapterTraining
from espalier.training.loop import Loop
from espalier.training.private.steps import PrivateSteps
from tests.bench import Bench
from tests.hf.tiny_models import CPU, llama_config, save_model
from tests.methods.tuning.adapters_sent import PATHS
from tests.methods.tuning.test_exact_factors import FEW_STEPS, SCALING
from tests.training.adapters.test_adapter_training import (
    Values,
    sequences,
    settings_of,
    start_of,
    training_of,
)

FOLDED = 3
"""Rank of the folded update."""
MODULES = {
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Modules of LLaMA's blocks by canonical name."""


def folded_update(adapters: AdapterPlan) -> Values:
    """Return random factors of a folded update of every adapted matrix."""
    generator = torch.Generator().manual_seed(11)
    return {
        block_key(index): {
            name: 0.1 * torch.randn(shape, generator=generator)
            for adapter in block
            for name, shape in adapter.folded_shapes(FOLDED).items()
        }
        for index, block in adapters.blocks.items()
    }


def merged_base(
    model: OpenedModel, adapters: AdapterPlan, folded: Values, directory: Path
) -> OpenedModel:
    """Write a copy of a model whose matrices contain the folded update."""
    directory.mkdir()
    for file in model.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    for index, adapter in adapters:
        block = folded[block_key(index)]
        name = f"model.layers.{index}.{MODULES[adapter.linear.name]}.weight"
        weights[name] += adapter.scaling * block[adapter.folded_b] @ block[adapter.folded_a]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return OpenedModel(directory)


def largest_difference(one: Values, other: Values) -> float:
    return max(
        float((value - other[key][name]).abs().max())
        for key, block in one.items()
        for name, value in block.items()
    )


def test_training_equals_that_over_the_merged_base(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    model = OpenedModel(save_model(tmp_path / "base", llama_config(num_hidden_layers=2)))
    training = training_of(model)
    folded = folded_update(training.adapters)
    start = start_of(training)
    both = {key: {**block, **folded[key]} for key, block in start.items()}
    found, _ = training.run(both, 0, 3)
    merged = merged_base(model, training.adapters, folded, tmp_path / "merged")
    plain = AdapterTraining(merged, CPU, settings_of(), training.adapters, sequences(), 5)
    expected, _ = plain.run(start, 0, 3)
    assert largest_difference(found, expected) < 1e-5
    # The update is large enough to be noticed: without it the adapters end elsewhere.
    without, _ = training_of(model).run(start, 0, 3)
    assert largest_difference(without, expected) > 1e-3


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedpetuning", {"fedpetuning.aggregation": "fedex"}),
        ("flora", {"lora.ranks": "1,2,2"}),
        (
            "fedpetuning",
            {
                "fedpetuning.aggregation": "fedex",
                "federation.client-weights": "equal",
                "privacy.epsilon": 8.0,
                "privacy.noise": "seed",
                "privacy.sampling-rate": 0.5,
                "evaluation.local-baseline": False,
            },
        ),
    ],
)
def test_clients_of_the_second_round_train_over_the_folded_base(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    settings: Mapping[str, Any],
) -> None:
    """What a client's model computes when it begins is what the merged base computes."""
    if "privacy.epsilon" in settings:
        pytest.importorskip("opacus", reason="needs the extra privacy")
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    tokens = torch.arange(3, 11)[None]
    begun: list[Tensor] = []

    def spy(kind: Any) -> None:
        plain = kind.run

        def run(self: Any, first_step: int, *others: Any) -> Any:
            if first_step > 0:
                with torch.no_grad():
                    begun.append(self.model(input_ids=tokens).logits)
            return plain(self, first_step, *others)

        monkeypatch.setattr(kind, "run", run)

    spy(Loop)
    spy(PrivateSteps)
    bench = Bench(tmp_path, method, {**FEW_STEPS, "lora.dropout": 0.0, **settings}, num_clients=3)
    grid = bench.grid(part_bytes=1 << 20)
    sent: dict[str, dict[str, Tensor]] = {}

    def look(message: Any) -> None:
        body = read(message.content)
        if body.header.kind == "train" and body.header.server_round == 2:
            sent.update({key: load(blob) for key, blob in body.blobs.items()})

    grid.before_push = look
    bench.run(grid, part_bytes=1 << 20)
    whole = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    with torch.no_grad():
        unchanged = whole(input_ids=tokens).logits
        for key, block in sent.items():
            layer = whole.model.layers[int(key.removeprefix("block-"))]
            for matrix, path in PATHS.items():
                weight = layer.get_submodule(path).weight
                # A client of FLoRA begins with B = 0, and is not sent any adapters.
                for kind in ("lora", "folded"):
                    if f"{matrix}.{kind}_b" in block:
                        b, a = block[f"{matrix}.{kind}_b"], block[f"{matrix}.{kind}_a"]
                        weight += SCALING * b @ a
        expected = whole(input_ids=tokens).logits
    assert len(begun) >= 3
    for logits in begun:
        np.testing.assert_allclose(logits.detach(), expected, rtol=0, atol=1e-5)
    assert float((expected - unchanged).abs().max()) > 1e-4
