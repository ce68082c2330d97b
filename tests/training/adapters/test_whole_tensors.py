"""Training of adapters together with tensors that are trained whole.

It is compared with a slow loop, on every base dtype, by canonical names.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Batch
from espalier.hf.export.adapter import export_adapter
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.full_tensors import Names, stored_values
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.settings.run import RunSettings, parse
from espalier.training.adapted_model import flat_name
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters, initial_values
from espalier.training.loss import summed_loss
from espalier.training.optimizer import Group
from espalier.training.sequences import Sequences, encoded_sequences, sequences_of_step
from tests.hf.tiny_models import CPU, VOCABULARY, llama_config, save_model
from tests.tiny_model import save_tiny_roberta

Values = dict[str, dict[str, Tensor]]
WHOLE = {
    "block-0001": ["norm.attn.weight", "norm.mlp.weight"],
    "block-0000": ["attn.v.bias"],
    "final": ["norm.final.weight"],
}
PATHS = {
    "block-0001/norm.attn.weight": "model.layers.1.input_layernorm.weight",
    "block-0001/norm.mlp.weight": "model.layers.1.post_attention_layernorm.weight",
    "block-0000/attn.v.bias": "model.layers.0.self_attn.v_proj.bias",
    "final/norm.final.weight": "model.norm.weight",
}
SEED = 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    """Two blocks with biases and sizes that NF4 can represent."""
    config = llama_config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, attention_bias=True
    )
    return OpenedModel(save_model(tmp_path_factory.mktemp("llama"), config))


def sequences() -> Sequences:
    generator = torch.Generator().manual_seed(2)
    lengths = [(9, 4), (6, 5), (11, 1), (4, 2), (8, 7)]
    rows = [
        (torch.randint(VOCABULARY, (length,), generator=generator).tolist(), answer)
        for length, answer in lengths
    ]
    return encoded_sequences(tuple(Encoded(tuple(ids), answer) for ids, answer in rows))


def settings_of(**changes: Any) -> RunSettings:
    given = {
        "method": "fedpetuning", "lora.rank": 2, "lora.alpha": 4.0, "lora.targets": "attn.q,mlp.up",
        "training.batch-size": 2, "training.learning-rate": 0.01, "training.steps": 3,
        "federation.rounds": 2,
    }  # fmt: skip
    return parse(
        given | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    )


def shapes_of(model: OpenedModel, names: Names) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes in the form of ``AdapterPlan.whole``."""
    return {
        key: {name: tuple(value.shape) for name, value in own.items()}
        for key, own in stored_values(model, names).items()
    }


def training_of(
    model: OpenedModel, dtype: torch.dtype = torch.float32, **changes: Any
) -> AdapterTraining:
    settings = settings_of(**changes)
    plan = replace(adapter_plan(model.plan, settings.lora), whole=shapes_of(model, WHOLE))
    return AdapterTraining(
        model, Computing(torch.device("cpu"), dtype, 1), settings, plan, sequences(), SEED
    )


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value for key, block in tensors.items() for name, value in block.items()
    }


def same(one: Values, other: Values) -> bool:
    return flat(one).keys() == flat(other).keys() and all(
        torch.equal(flat(one)[name], flat(other)[name]) for name in flat(one)
    )


def mean_loss(
    model: nn.Module, plan: AdapterPlan, values: Mapping[str, Tensor], step: int
) -> Tensor:
    """Return the mean loss, computed text by text and token by token.

    The model is that of transformers, with the weights ``W + s B A`` and the tensors trained whole.
    """
    state = {path: values[name] for name, path in PATHS.items()}
    for index, adapter in plan:
        a, b = (values[f"block-{index:04d}/{name}"] for name in (adapter.name_a, adapter.name_b))
        weight = model.get_parameter(adapter.linear.parameter).detach()
        state[adapter.linear.parameter] = weight + adapter.scaling * b @ a
    losses = []
    for number in sequences_of_step(5, 2, step, SEED):
        one = sequences().parts[0][number]
        logits = functional_call(
            model, state, (), {"input_ids": torch.tensor([one.token_ids])}
        ).logits[0]
        for place in range(len(one.token_ids) - one.answer_tokens, len(one.token_ids)):
            losses.append(-logits[place - 1].log_softmax(-1)[one.token_ids[place]])
    return torch.stack(losses).mean()


def test_both_are_trained_as_in_a_slow_loop(llama: OpenedModel) -> None:
    training = training_of(llama, training__weight_decay=0.1)
    start = initial_values(llama, training.adapters, 3)
    found, _ = training.run(start, 0, 3)
    model = AutoModelForCausalLM.from_pretrained(llama.directory).eval()
    values = {name: value.clone().requires_grad_() for name, value in flat(start).items()}
    optimizer = torch.optim.AdamW(values.values(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(model, training.adapters, values, step).backward()
        nn.utils.clip_grad_norm_(values.values(), 1.0)
        optimizer.step()
    for name, value in flat(found).items():
        torch.testing.assert_close(value, values[name].detach(), rtol=1e-3, atol=1e-4)
        assert not torch.equal(value, flat(start)[name])


def test_first_values_come_from_seed_and_files(llama: OpenedModel) -> None:
    plan = training_of(llama).adapters
    found = initial_values(llama, plan, 3)
    stored = stored_values(llama, WHOLE)
    assert list(found) == list(plan.shapes()) == ["block-0000", "block-0001", "final"]
    assert {name: tuple(value.shape) for name, value in flat(found).items()} == flat(plan.shapes())  # type: ignore[arg-type]
    adapters = flat(initial_adapters(plan, 3))
    assert all(
        torch.equal(value, (adapters | flat(stored))[name]) for name, value in flat(found).items()
    )
    assert plan.num_parameters == sum(value.numel() for value in flat(found).values())


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_names_shapes_and_values_on_every_base(llama: OpenedModel, base: str) -> None:
    """Training starts with the values of the files and returns whole tensors in float32."""
    training = training_of(llama, torch.bfloat16, training__base=base, training__batch_size=5)
    start = initial_values(llama, training.adapters, 3)
    stored = flat(stored_values(llama, WHOLE))
    assert all(
        torch.equal(flat(training.adapted.values())[name], value) for name, value in stored.items()
    )
    found, trained = training.run(start, 0, 25)
    assert trained.losses[-1] < 0.6 * trained.losses[0]
    assert {name: tuple(value.shape) for name, value in flat(found).items()} == flat(
        training.adapters.shapes()
    )  # type: ignore[arg-type]
    assert {value.dtype for value in flat(found).values()} == {torch.float32}
    assert all(0 < (flat(found)[name] - value).abs().max() < 0.5 for name, value in stored.items())
    training.adapted.set(start)
    assert all(
        torch.equal(flat(training.adapted.values())[name], value) for name, value in stored.items()
    )


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_six_steps_are_three_and_three_more(llama: OpenedModel, base: str) -> None:
    """Covers checkpointing in one of both, which changes nothing."""
    options: dict[str, Any] = {
        "training__base": base,
        "lora__dropout": 0.2,
        "training__proximal": 0.0,
    }
    start = initial_values(llama, training_of(llama).adapters, 3)
    at_once, _ = training_of(llama, **options, training__gradient_checkpointing=True).run(
        start, 0, 6
    )
    half, first = training_of(llama, **options).run(start, 0, 3)
    resumed, second = training_of(llama, **options).run(half, 3, 3, first.moments)
    assert set(second.moments) == {
        flat_name(key, name) for key, block in start.items() for name in block
    }
    for name, value in flat(at_once).items():
        torch.testing.assert_close(flat(resumed)[name], value, rtol=1e-4, atol=1e-6)
    assert same(resumed, training_of(llama, **options).run(half, 3, 3, first.moments)[0])
    assert not same(resumed, training_of(llama, **options).run(half, 3, 3)[0])


def test_groups_and_losses_address_them_by_name(llama: OpenedModel) -> None:
    """AdamW's first step moves every element by the rate of its group.

    A loss times 0.1 has a gradient times 0.1.
    """
    seen: list[tuple[int, Mapping[str, Mapping[str, Tensor]]]] = []
    found = []
    start = initial_values(llama, training_of(llama).adapters, 3)
    for share in (1.0, 0.1):

        def scaled(model: Any, batch: Batch, device: torch.device, share: float = share) -> Tensor:
            return share * summed_loss(model, batch, device)

        training = replace(
            training_of(llama),
            groups=[
                Group([flat_name(key, name) for key, names in WHOLE.items() for name in names], 0.1)
            ],
            loss=scaled,
            observer=lambda step, gradients: seen.append((step, gradients)),
            penalty=lambda tensors: 1e-3 * tensors["final"]["norm.final.weight"].sum(),
        )
        found.append(training.run(start, 4, 1))
    assert [step for step, _ in seen] == [4, 4]
    assert {key: list(block) for key, block in seen[0][1].items()} == {
        key: list(block) for key, block in start.items()
    }
    for name, gradient in flat(seen[0][1]).items():
        torch.testing.assert_close(flat(seen[1][1])[name], 0.1 * gradient, rtol=1e-3, atol=1e-7)
    assert found[1][1].losses[0] == pytest.approx(0.1 * found[0][1].losses[0], rel=1e-4)
    moved = {name: (value - flat(start)[name]).abs() for name, value in flat(found[0][0]).items()}
    for name, gradient in flat(seen[0][1]).items():
        far = moved[name][gradient.abs() > 2e-3]
        # B is zero at the start, so A has no gradient.
        assert len(far) > 0 or name.endswith("lora_a")
        torch.testing.assert_close(
            far, torch.full_like(far, 0.001 if name in PATHS else 0.01), rtol=1e-2, atol=0
        )


def test_own_vector_is_trained_under_its_name(llama: OpenedModel) -> None:
    """A vector that scales the output of the first block is trained; it starts at 0.5."""
    training = training_of(llama, training__batch_size=5)
    vector = nn.Parameter(torch.ones(64))
    training.adapted.whole.model.layers[0].register_forward_hook(
        lambda _, __, output: output * vector
    )
    training.adapted.parameters["gate"] = {"vector": vector}
    start = initial_values(llama, training.adapters, 3)
    found, trained = training.run(start | {"gate": {"vector": torch.full((64,), 0.5)}}, 0, 4)
    assert trained.losses[-1] < trained.losses[0]
    assert found["gate"]["vector"].shape == (64,)
    moved = (found["gate"]["vector"] - 0.5).abs()
    assert 0.005 < moved.max() < 0.05
    assert bool((moved > 0).all())


def test_a_head_is_one_case_of_them(tmp_path: Path) -> None:
    """An encoder's head is trained together with a norm; its first values are drawn."""
    model = OpenedModel(save_tiny_roberta(tmp_path / "roberta"))
    settings = settings_of()
    plan = adapter_plan(model.plan, settings.lora, 3)
    plan = replace(plan, whole=plan.whole | shapes_of(model, {"block-0001": ["norm.mlp.bias"]}))
    training = AdapterTraining(model, CPU, settings, plan, sequences(), SEED)
    values = flat(training.adapted.values())
    assert list(plan.head) == [
        "head.dense.weight",
        "head.dense.bias",
        "head.out.weight",
        "head.out.bias",
    ]
    assert [name for name in values if name.startswith("head/")] == [
        f"head/{name}" for name in plan.head
    ]
    first = flat(initial_values(model, plan, settings.seed))
    assert set(first) == set(values)
    assert all(torch.equal(values[name], first[name]) for name in values if "lora" not in name)
    stored = stored_values(model, {"block-0001": ["norm.mlp.bias"]})
    assert torch.equal(first["block-0001/norm.mlp.bias"], stored["block-0001"]["norm.mlp.bias"])


def test_peft_file_does_not_omit_them_silently(llama: OpenedModel, tmp_path: Path) -> None:
    plan = training_of(llama).adapters
    with pytest.raises(
        ValueError, match="block-0000, block-0001, final: peft cannot store the modules"
    ):
        export_adapter(
            llama, plan, initial_values(llama, plan, 3).__getitem__, tmp_path / "adapter"
        )
    assert not (tmp_path / "adapter").exists()
