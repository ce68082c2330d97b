"""Adapters in whole models: canonical names, exact values, and merged weights equal to peft's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from espalier.hf.families import FAMILIES
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.adapters import (
    lora_config,
    merged,
    put_in,
    set_values,
    updated,
    values,
)
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import block_key
from espalier.settings.tables.lora import LoraSettings
from tests.devices import assert_close
from tests.hf.tiny_encoders import ENCODERS, save_encoder
from tests.hf.tiny_models import (
    CPU,
    DENSE,
    MIXTURES,
    OWN_KEYS,
    llama_config,
    save_model,
    tiny_config,
    token_sequences,
    whole_model,
)

Values = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    found = {
        name: save_model(tmp_path_factory.mktemp(name), tiny_config(name)) for name in OWN_KEYS
    }
    found |= {name: save_encoder(tmp_path_factory.mktemp(name), name) for name in ENCODERS}
    return {name: OpenedModel(directory) for name, directory in found.items()}


def whole_of(model: OpenedModel, computing: Computing = CPU) -> Any:
    return load_whole(
        model, computing, "float32", num_labels=3 if model.family.kind == "encoder" else None
    )


def plan_of(model: OpenedModel, **lora: Any) -> AdapterPlan:
    """Return the adapter plan without ``whole``, which has the classification head."""
    return replace(
        adapter_plan(model.plan, LoraSettings(**{"rank": 2, "alpha": 3.0} | lora)), whole={}
    )


def random_values(plan: AdapterPlan, seed: int = 1) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in block.items()}
        for key, block in plan.shapes().items()
    }


def adapted(
    model: OpenedModel, plan: AdapterPlan, dropout: float = 0.0, computing: Computing = CPU
) -> tuple[Any, dict[str, dict[str, nn.Parameter]]]:
    whole = whole_of(model, computing)
    return whole, put_in(whole, model.family, plan, len(model.plan.blocks), dropout)


def layers_of(whole: nn.Module) -> dict[str, Any]:
    """Return peft's LoRA layers by path."""
    return {path: module for path, module in whole.named_modules() if hasattr(module, "lora_A")}


# ----- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, "attn.q,attn.v,mlp.down") for name in (*DENSE, *ENCODERS) if name != "phi3"]
    + [("phi3", "attn.qkv,mlp.gateup"), *((name, "attn.q,attn.v") for name in MIXTURES)],
)
def test_wire_names_are_the_same_in_all_families(
    models: dict[str, OpenedModel], name: str, targets: str
) -> None:
    _, parameters = adapted(models[name], plan_of(models[name], targets=targets, layers="1"))
    assert {key: sorted(block) for key, block in parameters.items()} == {
        "block-0001": [
            f"{linear}.lora_{factor}" for linear in targets.split(",") for factor in "ab"
        ]
    }


TARGETS = ("all", "attn.o", "mlp.down", "attn.q,mlp.up")


@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, own) for name in (*DENSE, *ENCODERS) if name != "phi3" for own in TARGETS]
    + [(name, own) for name in ("phi3", *MIXTURES) for own in TARGETS[:2]],
)
def test_exactly_the_planned_matrices_are_trained(
    models: dict[str, OpenedModel], name: str, targets: str
) -> None:
    """BERT's mlp.down is ``output.dense``; the path of its attn.o ends with the same words."""
    model = models[name]
    plan = plan_of(model, targets=targets)
    whole = whole_of(model)
    trained_before = {
        path for path, parameter in whole.named_parameters() if parameter.requires_grad
    }
    parameters = put_in(whole, model.family, plan, len(model.plan.blocks), 0.0)
    paths = {model.family.module_path(index, adapter.linear.name) for index, adapter in plan}
    assert set(layers_of(whole)) == paths
    trained = {path for path, parameter in whole.named_parameters() if parameter.requires_grad}
    assert trained == trained_before | {
        f"{path}.lora_{factor}.default.weight" for path in paths for factor in "AB"
    }
    # Encoders also train their classification head, which has four tensors.
    assert len(trained_before) == (4 if name in ENCODERS else 0)
    found = {
        key: {each: tuple(value.shape) for each, value in block.items()}
        for key, block in parameters.items()
    }
    assert found == plan.shapes()
    assert (
        sum(value.numel() for block in parameters.values() for value in block.values())
        == plan.num_parameters
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_short_names_for_peft_are_unambiguous(family: Any) -> None:
    """peft gets a short name if it identifies one matrix of a block, and full paths if it does not.

    Short names keep ``adapter_config.json`` small.
    """
    from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan

    linears = tuple(LinearPlan(name, name, (8, 8)) for name in family.linears)
    plan = ModelPlan(tuple(BlockPlan(index, linears) for index in range(3)), 1)
    for targets in ("all", *family.linears):
        found = lora_config(
            family, adapter_plan(plan, LoraSettings(targets=targets, rank=2)), 3, 0.0
        ).target_modules
        meant = set(family.linears.values()) if targets == "all" else {family.linears[targets]}
        if family.kind == "encoder" and targets == "mlp.down":
            meant = {f"{family.blocks}.{index}.output.dense" for index in range(3)}
        assert found == meant


# ----- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OWN_KEYS, *ENCODERS])
def test_values_come_back_bit_by_bit(
    models: dict[str, OpenedModel], name: str, computing: Computing
) -> None:
    model = models[name]
    plan = plan_of(model, targets="all")
    whole, parameters = adapted(model, plan, computing=computing)
    meant = random_values(plan)
    set_values(parameters, meant)
    found = values(parameters)
    assert all(
        torch.equal(found[key][each], value)
        for key, block in meant.items()
        for each, value in block.items()
    )
    layer = layers_of(whole)[model.family.module_path(1, "attn.o")]
    assert torch.equal(layer.lora_A["default"].weight.cpu(), meant["block-0001"]["attn.o.lora_a"])
    assert torch.equal(layer.lora_B["default"].weight.cpu(), meant["block-0001"]["attn.o.lora_b"])
    found["block-0000"]["attn.o.lora_a"].zero_()
    assert torch.equal(
        values(parameters)["block-0000"]["attn.o.lora_a"], meant["block-0000"]["attn.o.lora_a"]
    )


def test_one_row_is_not_repeated(models: dict[str, OpenedModel]) -> None:
    """A tensor of rank 1 is refused; ``copy_`` would broadcast it to every rank."""
    model = models["llama"]
    _, parameters = adapted(model, plan_of(model))
    with pytest.raises(
        ValueError,
        match=r"block-0000 attn.q.lora_a has shape \[1, 32\], but its parameter has \[2, 32\]",
    ):
        set_values(parameters, random_values(plan_of(model, rank=1)))


@pytest.mark.parametrize("name", ["llama", "roberta"])
@torch.no_grad()
def test_a_zero_b_leaves_the_output_as_it_is(
    models: dict[str, OpenedModel], name: str, computing: Computing
) -> None:
    model = models[name]
    samples = (token_sequences(3, 9) % 90 + 2).to(computing.device)
    plan = plan_of(model, targets="all")
    before = whole_of(model, computing)(input_ids=samples).logits
    whole, parameters = adapted(model, plan, 0.5, computing)
    meant = random_values(plan)
    set_values(
        parameters,
        {
            k: {n: v * (not n.endswith("_b")) for n, v in block.items()}
            for k, block in meant.items()
        },
    )
    assert torch.equal(whole.eval()(input_ids=samples).logits, before)
    set_values(parameters, meant)
    assert (whole(input_ids=samples).logits - before).abs().max() > 1e-3


def test_no_global_generator_is_moved(models: dict[str, OpenedModel]) -> None:
    model = models["llama"]
    whole = whole_of(models["llama"])
    before = torch.get_rng_state()
    put_in(whole, model.family, plan_of(model), 2, 0.1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_adapters_are_float32_on_any_base(base: Any, tmp_path: Path, computing: Computing) -> None:
    directory = save_model(
        tmp_path, llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    )
    model = OpenedModel(directory)
    whole = load_whole(model, computing, base)
    plan = plan_of(model, targets="all")
    parameters = put_in(whole, model.family, plan, 1, 0.0)
    assert {value.dtype for value in parameters["block-0000"].values()} == {torch.float32}
    assert all(value.requires_grad for value in parameters["block-0000"].values())
    whole(input_ids=token_sequences(2, 7).to(computing.device)).logits.float().sum().backward()
    assert all(value.grad is not None for value in parameters["block-0000"].values())


# ----- ranks and scalings -------------------------------------------------------------------------


def test_ranks_and_scalings_arrive_in_peft(models: dict[str, OpenedModel]) -> None:
    """alpha / rank is 3/2."""
    model = models["llama"]
    plan = plan_of(model, targets="attn.q,mlp.up")
    whole, _ = adapted(model, plan, dropout=0.25)
    found = {
        path: (layer.r["default"], layer.scaling["default"])
        for path, layer in layers_of(whole).items()
    }
    layers = "model.layers"
    assert found == {
        f"{layers}.0.self_attn.q_proj": (2, 1.5), f"{layers}.1.self_attn.q_proj": (2, 1.5),
        f"{layers}.0.mlp.up_proj": (2, 1.5), f"{layers}.1.mlp.up_proj": (2, 1.5),
    }  # fmt: skip
    assert {layer.lora_dropout["default"].p for layer in layers_of(whole).values()} == {0.25}


def test_a_limit_keeps_the_scaling(models: dict[str, OpenedModel]) -> None:
    model = models["opt"]
    plan = plan_of(model, targets="all", rank=6, alpha=9.0).limited(4)
    whole, _ = adapted(model, plan)
    assert {
        (layer.r["default"], layer.scaling["default"]) for layer in layers_of(whole).values()
    } == {(4, 1.5)}


def test_block_1_is_not_block_11(tmp_path: Path) -> None:
    model = OpenedModel(save_model(tmp_path, llama_config(num_hidden_layers=12)))
    plan = plan_of(model, layers="1,11")
    whole, _ = adapted(model, plan)
    assert {path for path in layers_of(whole) if "q_proj" in path} == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.11.self_attn.q_proj",
    }


def test_alphas_are_integers_where_possible(models: dict[str, OpenedModel]) -> None:
    model = models["llama"]
    whole_number = lora_config(model.family, plan_of(model, alpha=4.0), 2, 0.0)
    assert (whole_number.lora_alpha, type(whole_number.lora_alpha)) == (4, int)
    assert lora_config(model.family, plan_of(model, alpha=2.5), 2, 0.0).lora_alpha == 2.5


# ----- merging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "opt", "bert"])
def test_merged_weights_are_those_of_peft(models: dict[str, OpenedModel], name: str) -> None:
    """Each merged weight equals peft's and ``W + s B A`` in float64."""
    from peft import PeftModel, get_peft_model

    model = models[name]
    plan = plan_of(model, targets="all", layers="1")
    meant = random_values(plan)
    edits = merged(plan, meant)
    tuned: PeftModel = get_peft_model(whole_of(model), lora_config(model.family, plan, 2, 0.0))
    for index, adapter in plan:
        layer = tuned.get_base_model().get_submodule(
            model.family.module_path(index, adapter.linear.name)
        )
        layer.lora_A["default"].weight.data.copy_(meant[block_key(index)][adapter.name_a])
        layer.lora_B["default"].weight.data.copy_(meant[block_key(index)][adapter.name_b])
    by_peft = tuned.merge_and_unload()
    stored = load_file(model.directory / "model.safetensors")
    assert edits(0) == {}
    assert set(edits(1)) == set(model.family.linears)
    for index, adapter in plan:
        weight = stored[adapter.linear.parameter]
        found = edits(index)[adapter.linear.name](weight)
        expected = by_peft.get_submodule(
            model.family.module_path(index, adapter.linear.name)
        ).weight
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
        a, b = (meant["block-0001"][each].double() for each in (adapter.name_a, adapter.name_b))
        torch.testing.assert_close(
            found.double(), weight.double() + 1.5 * b @ a, rtol=1e-6, atol=1e-6
        )
        assert not torch.equal(found, weight)


def test_merged_weight_is_rounded_once() -> None:
    from pruning_kernels.lora.factors import Factors

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 5, generator=generator).to(torch.bfloat16)
    b = torch.randn(6, 2, generator=generator)
    a = torch.randn(2, 5, generator=generator)
    found = updated(Factors(b, a, 0.5), False, weight)
    exact = weight.double() + 0.5 * b.double() @ a.double()
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@torch.no_grad()
def test_adapters_compute_what_the_merge_does(
    models: dict[str, OpenedModel], tmp_path: Path, computing: Computing
) -> None:
    from espalier.hf.export.model import export_edited

    model = models["llama"]
    samples = token_sequences(3, 9)
    plan = plan_of(model, targets="all")
    meant = random_values(plan)
    whole, parameters = adapted(model, plan, computing=computing)
    set_values(parameters, meant)
    export_edited(
        model,
        merged(plan, meant),
        tmp_path / "merged",
    )
    expected = whole_model(tmp_path / "merged")(input_ids=samples).logits
    assert_close(whole(input_ids=samples.to(computing.device)).logits, expected, cpu=1e-4)
