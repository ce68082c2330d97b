"""Frozen adapters in a model: they compute, keep their values and need no backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.data.tasks.item import Batch
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.settings.run import parse
from espalier.settings.tables.lora import LoraSettings
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from tests.tiny_model import save_tiny_llama

CPU = Computing(torch.device("cpu"), torch.float32, 1)
SETTINGS = parse(
    {
        "method": "fedpetuning",
        "training.steps": 2,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
    }
)
BLOCKS = 6


class Sequences:
    """Sequences of random tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(3, 260, (8, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, numbers: Any) -> Batch:
        own = self.tokens[list(numbers)]
        return Batch(own, torch.ones_like(own), own.clone())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("base"), blocks=BLOCKS))


def plan(model: OpenedModel, layers: str) -> AdapterPlan:
    return adapter_plan(model.plan, LoraSettings(rank=2, alpha=4.0, layers=layers))


def training(model: OpenedModel, trained: str, frozen: str = "") -> AdapterTraining:
    """Return a training of the adapters of some blocks, together with frozen adapters of others."""
    beside = plan(model, frozen) if frozen else None
    values = {}
    if beside is not None:
        generator = torch.Generator().manual_seed(1)
        values = {
            key: {
                name: torch.randn(shape, generator=generator) / 10 for name, shape in shapes.items()
            }
            for key, shapes in beside.shapes().items()
        }
    adapters = plan(model, trained).joined(beside)
    return AdapterTraining(model, CPU, SETTINGS, adapters, Sequences(), 0, frozen=values)  # type: ignore[arg-type]


def saved_bytes(one: AdapterTraining, start: dict[str, dict[str, Tensor]]) -> int:
    """Return the bytes that a step keeps for its backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one.run(start, 0, 1)
    return sum(kept.values())


def test_frozen_adapters_keep_their_values(model: OpenedModel) -> None:
    one = training(model, "5", "0,2")
    tensors, _ = one.run(initial_adapters(plan(model, "5"), 0), 0, 2)
    assert set(tensors) == {"block-0005"}
    assert tensors["block-0005"]["attn.q.lora_b"].any()
    now = one.adapted.values()
    for key, block in one.frozen.items():
        for name, value in block.items():
            assert torch.equal(now[key][name], value)


def test_they_change_what_is_learnt(model: OpenedModel) -> None:
    start = initial_adapters(plan(model, "5"), 0)
    alone, _ = training(model, "5").run(start, 0, 2)
    beside, _ = training(model, "5", "0,2").run(start, 0, 2)
    assert not torch.equal(
        alone["block-0005"]["attn.q.lora_a"], beside["block-0005"]["attn.q.lora_a"]
    )


def test_backward_pass_stops_at_what_is_trained(model: OpenedModel) -> None:
    """The input of the last block needs no gradient, although adapters below it compute.

    So a step keeps few activations.
    """
    one = training(model, "5", "0,2")
    asked = list[bool]()
    layers = one.adapted.whole.model.layers
    handle = layers[5].register_forward_pre_hook(
        lambda _, inputs: asked.append(inputs[0].requires_grad)
    )
    one.run(initial_adapters(plan(model, "5"), 0), 0, 2)
    handle.remove()
    assert asked == [False, False]
    last = saved_bytes(training(model, "5", "0,2"), initial_adapters(plan(model, "5"), 0))
    all_blocks = saved_bytes(training(model, "all"), initial_adapters(plan(model, "all"), 0))
    assert last < 0.5 * all_blocks
