"""Norms, biases and heads by canonical name in each family; float32 for every base dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.full_tensors import stored_values, trained_whole
from espalier.hf.whole.model import load_whole
from espalier.models.plan import block_key, block_of_key
from tests.hf.tiny_encoders import ENCODERS, save_encoder
from tests.hf.tiny_models import (
    DENSE,
    llama_config,
    random_model,
    save_model,
    tiny_config,
    token_sequences,
)


def opened(directory: Path, name: str) -> OpenedModel:
    if name in ENCODERS:
        return OpenedModel(save_encoder(directory, name, hidden_size=64, intermediate_size=64))
    return OpenedModel(save_model(directory, wide_config(name)))


def wide_config(kind: str) -> PretrainedConfig:
    """Return a configuration whose matrices NF4 can represent."""
    of_opt = {"ffn_dim": 64, "word_embed_proj_dim": 64} if kind == "opt" else {}
    return tiny_config(kind, hidden_size=64, intermediate_size=64, **of_opt)


def whole_of(
    model: OpenedModel, base: Any = "float32", dtype: torch.dtype = torch.float32
) -> nn.Module:
    labels = 3 if model.family.kind == "encoder" else None
    whole: nn.Module = load_whole(
        model, Computing(torch.device("cpu"), dtype, 1), base, num_labels=labels
    )
    return whole


@pytest.mark.parametrize("name", [*DENSE, *ENCODERS])
def test_block_tensors_have_one_canonical_name(tmp_path: Path, name: str) -> None:
    model = opened(tmp_path, name)
    of = [*model.family.linears, *model.family.norms]
    paths = [
        model.family.parameter_path(f"{one}.{kind}", 1) for one in of for kind in ("weight", "bias")
    ]
    held = [
        path
        for path, _ in whole_of(model).named_parameters()
        if path.startswith(f"{model.family.blocks}.1.")
    ]
    assert len(set(paths)) == len(paths)
    assert set(held) <= set(paths)
    assert len(held) >= len(model.family.linears) + 2
    outside = [
        model.family.parameter_path(f"{one}.weight", None)
        for one in ("norm.final", "head.dense", "head.out")
    ]
    assert [path is not None for path in outside] == (
        [False, True, True] if name in ENCODERS else [True, False, False]
    )
    assert model.family.parameter_path("norm.final.weight", 1) is None
    assert model.family.parameter_path("attn.q.weight", None) is None


def test_block_keys_are_read_as_they_are_written() -> None:
    assert [block_of_key(block_key(index)) for index in (0, 7, 12345)] == [0, 7, 12345]
    assert [
        block_of_key(key) for key in ("head", "block-1", "block-", "block-00001", "block--001", "")
    ] == [None] * 6


def test_shapes_and_values_are_those_of_the_files(tmp_path: Path) -> None:
    """Covers BERT's old names and files in bfloat16."""
    names = {"block-0001": ["norm.mlp.weight", "attn.v.bias"], "final": ["norm.final.bias"]}
    directory = tmp_path / "opt"
    config = wide_config("opt")
    save_model(directory, config, torch.bfloat16)
    model = OpenedModel(directory)
    stored = load_file(directory / "model.safetensors")
    found = stored_values(model, names)
    assert {
        key: {name: tuple(value.shape) for name, value in own.items()} for key, own in found.items()
    } == {
        "block-0001": {"norm.mlp.weight": (64,), "attn.v.bias": (64,)},
        "final": {"norm.final.bias": (64,)},
    }
    exact = random_model(config).state_dict()
    for (key, name), path in {
        ("block-0001", "norm.mlp.weight"): "model.decoder.layers.1.final_layer_norm.weight",
        ("block-0001", "attn.v.bias"): "model.decoder.layers.1.self_attn.v_proj.bias",
        ("final", "norm.final.bias"): "model.decoder.final_layer_norm.bias",
    }.items():
        assert found[key][name].dtype == torch.float32
        assert torch.equal(found[key][name], stored[path].float())
        assert torch.equal(found[key][name], exact[path].to(torch.bfloat16).float())


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("name", ["opt", "llama", "roberta"])
def test_float32_tensors_leave_logits_unchanged(tmp_path: Path, name: str, base: Any) -> None:
    """Before training, a float32 tensor rounded at its use gives bitwise the same logits."""
    model = opened(tmp_path, name)
    dtype = torch.float32 if base == "float32" else torch.bfloat16
    before = whole_of(model, base, dtype)
    whole = whole_of(model, base, dtype)
    names = {block_key(1): ["norm.attn.weight", "attn.q.bias"], block_key(0): ["norm.mlp.weight"]}
    if name == "llama":
        names[block_key(1)].remove("attn.q.bias")
    names |= (
        {"head": ["head.out.weight"]} if name == "roberta" else {"final": ["norm.final.weight"]}
    )
    found = trained_whole(model, whole, names)
    assert {key: list(block) for key, block in found.items()} == names
    flat = {(key, each): value for key, block in found.items() for each, value in block.items()}
    assert all(
        value.dtype == torch.float32 and value.requires_grad and value.is_leaf
        for value in flat.values()
    )
    exact = stored_values(model, {key: few for key, few in names.items() if key != "head"})
    assert all(
        torch.equal(value, exact[key][each]) for (key, each), value in flat.items() if key != "head"
    )
    samples = token_sequences(2, 7) % 90 + 2
    logits = whole(input_ids=samples).logits
    assert torch.equal(logits, before(input_ids=samples).logits)
    logits.float().square().mean().backward()
    assert all(value.grad is not None and bool(value.grad.any()) for value in flat.values())
    head = {id(value) for path, value in whole.named_parameters() if path.startswith("classifier")}
    assert {id(value) for value in whole.parameters() if value.requires_grad} == head | {
        id(value) for value in flat.values()
    }


def test_small_steps_are_not_lost_on_bfloat16(tmp_path: Path) -> None:
    """Steps of 0.5% of a bfloat16 rounding step add up until the logits change."""
    model = opened(tmp_path, "llama")
    whole = whole_of(model, "bfloat16")
    norm = trained_whole(model, whole, {"final": ["norm.final.weight"]})["final"][
        "norm.final.weight"
    ]
    samples = token_sequences(2, 7)
    first = whole(input_ids=samples).logits
    with torch.no_grad():
        for _ in range(2000):
            norm += norm * 2e-5
    assert not torch.equal(whole(input_ids=samples).logits, first)
    values = stored_values(model, {"final": ["norm.final.weight"]})["final"]["norm.final.weight"]
    torch.testing.assert_close(norm.detach(), values * (1 + 2e-5) ** 2000, rtol=1e-3, atol=0)


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    model = opened(tmp_path, "qwen3")
    whole = whole_of(model)
    samples = token_sequences(2, 7)
    names = {
        block_key(0): ["norm.q.weight", "norm.attn.weight", "mlp.down.weight"],
        "final": ["norm.final.weight"],
    }
    found = trained_whole(model, whole, names)
    whole(input_ids=samples, labels=samples).loss.backward()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain(input_ids=samples, labels=samples).loss.backward()
    paths = [
        "layers.0.self_attn.q_norm",
        "layers.0.input_layernorm",
        "layers.0.mlp.down_proj",
        "norm",
    ]
    flat = [value for block in found.values() for value in block.values()]
    for value, path in zip(flat, paths, strict=True):
        expected = plain.get_parameter(f"model.{path}.weight").grad
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(value.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("block-0000", "attn.q.bias"),
        ("block-0002", "norm.mlp.weight"),
        ("block-0000", "norm.q.weight"),
        ("final", "head.out.weight"),
    ],
)
def test_what_the_model_does_not_have_is_named(tmp_path: Path, key: str, name: str) -> None:
    model = OpenedModel(save_model(tmp_path, llama_config(num_hidden_layers=2)))
    words = rf"contains no {name} of {key}; choose another tensor"
    with pytest.raises(EspalierError, match=words):
        trained_whole(model, whole_of(model), {key: [name]})
    with pytest.raises(EspalierError, match=words):
        stored_values(model, {key: [name]})


def test_a_quantised_matrix_is_not_trained_whole(tmp_path: Path) -> None:
    model = opened(tmp_path, "opt")
    whole = whole_of(model, "nf4")
    with pytest.raises(
        EspalierError, match=r"training\.base = 'nf4': block-0000 attn.q.weight is stored in 4 bits"
    ):
        trained_whole(model, whole, {"block-0000": ["attn.q.weight"]})
    trained_whole(model, whole, {"block-0000": ["attn.q.bias"]})
