"""A base model that plain transformers would read otherwise is refused before a run starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.base_check import require_finite_weights, require_same_logits
from espalier.hf.opening.opened_model import OpenedModel
from tests.hf.opening.changed_models import (
    CPU,
    EMBEDDING,
    HEAD,
    SAMPLES,
    Change,
    change_config,
    change_tensors,
)
from tests.hf.tiny_models import llama_config, save_model, tiny_config

HALF = Computing(torch.device("cpu"), torch.float16, 1)


def without(name: str) -> Change:
    return lambda tensors: {known: value for known, value in tensors.items() if known != name}


@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        (
            without(HEAD),
            {},
            (
                r"lm_head.weight is missing: the files contain model.embed_tokens.weight.*set"
                r" tie_word_embeddings"
            ),
        ),
        (
            without(EMBEDDING),
            {},
            (
                r"embed_tokens.weight is missing: the files contain lm_head.weight.*set"
                r" tie_word_embeddings"
            ),
        ),
        (
            without("model.norm.weight"),
            {},
            r"model.norm.weight is missing: its files contain \d+ tensors, such as lm_head",
        ),
        (
            dict,
            {"attention_bias": True},
            r"q_proj.bias is missing: config.json gives .* \(attention_bias\)",
        ),
        (
            dict,
            {"num_hidden_layers": 1},
            r"num_hidden_layers = 1, but the files contain more blocks",
        ),
        (dict, {"num_hidden_layers": 4}, r"model.layers.3.self_attn.q_proj.weight is missing"),
        (
            dict,
            {"intermediate_size": 40},
            r"proj.weight has shape \[\d+, 32\] in model.safetensors, but \[40, 32\] according",
        ),
        (
            dict,
            {"num_attention_heads": 5},
            r"num_attention_heads = 5 does not match .*q_proj.weight, which has 32 rows",
        ),
        (
            dict,
            {"rope_parameters": {"rope_type": "no such"}},
            r"config.json: transformers cannot build this model: .*no such",
        ),
        (
            lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
            {},
            r"q_proj.bias, but config.json gives",
        ),
        (
            lambda t: t | {"norm.weight": torch.ones(32)},
            {},
            r"contain both norm.weight and model.norm.weight",
        ),
    ],
)
def test_missing_and_surplus_tensors_are_named(
    tmp_path: Path, change: Change, config: dict[str, Any], told: str
) -> None:
    base = save_model(tmp_path / "base", llama_config())
    change_tensors(base, change)
    change_config(base, **config)
    with pytest.raises(EspalierError, match=told):
        require_same_logits(OpenedModel(base), CPU, SAMPLES)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    [
        HEAD,
        EMBEDDING,
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(
    tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    base = save_model(tmp_path / "base", llama_config())

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {known: tensor.to(dtype) for known, tensor in tensors.items()}
        tensors[name].view(-1)[-1] = value
        return tensors

    change_tensors(base, spoil)
    what = "NaN" if value != value else "an infinite number"
    with pytest.raises(EspalierError, match=rf"model.safetensors: tensor {name} contains {what}"):
        require_finite_weights(OpenedModel(base), CPU)


def test_weights_and_hash_are_read_once_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base", llama_config())
    expected = OpenedModel(base).sha256
    model = OpenedModel(base)
    read: list[str] = []
    chunks = model.checkpoint.chunks
    monkeypatch.setattr(
        model.checkpoint, "chunks", lambda name: (read.append(name), chunks(name))[1]
    )
    require_finite_weights(model, CPU)
    require_finite_weights(model, CPU)
    assert model.sha256 == expected
    assert sorted(read) == sorted(model.checkpoint.tensors)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("value", "stored", "dtype", "told"),
    [
        (65519.0, F32, F16, ""),
        (
            65520.0,
            F32,
            F16,
            r"'float16' overflows beyond 65504; set dtype to 'float32' or 'bfloat16'",
        ),
        (1e6, F32, F16, r"'float16' overflows beyond 65504; set dtype to 'float32' or 'bfloat16'"),
        (3.389e38, F32, BF16, ""),
        (3.4e38, F32, BF16, r"'bfloat16' overflows beyond 3.3895e\+38; set dtype to 'float32'"),
        (3.4e38, F32, F16, r"'float16' overflows beyond 65504; set dtype to 'float32'"),
        (
            1e300,
            torch.float64,
            F32,
            (
                r"'float32' overflows beyond 3.4028e\+38; no supported dtype can represent them:"
                r" name another model"
            ),
        ),
    ],
)
def test_overflow_is_refused_per_computing_dtype(
    tmp_path: Path, value: float, stored: torch.dtype, dtype: torch.dtype, told: str
) -> None:
    base = save_model(tmp_path / "base", llama_config())
    change_tensors(
        base,
        lambda tensors: tensors | {"model.norm.weight": torch.full((32,), value, dtype=stored)},
    )
    assert bool(torch.tensor(value, dtype=torch.float64).to(dtype).isinf()) == bool(told)
    model, computing = OpenedModel(base), Computing(torch.device("cpu"), dtype, 1)
    if not told:
        require_finite_weights(model, computing)
        return
    with pytest.raises(
        EspalierError,
        match=rf"tensor model.norm.weight contains numbers up to .*, and dtype = {told}$",
    ):
        require_finite_weights(model, computing)


def test_float16_overflow_names_its_block(tmp_path: Path) -> None:
    """Each weight fits float16; the sum that the second block computes does not."""
    base = save_model(tmp_path / "base", llama_config())
    change_tensors(
        base,
        lambda t: {name: value * 500 if "1.mlp" in name else value for name, value in t.items()},
    )
    model = OpenedModel(base)
    require_finite_weights(model, HALF)
    with pytest.raises(
        EspalierError,
        match=(
            r"dtype = 'float16': block 1 gives .*float16 overflows to infinity; set dtype to 'bfl"
        ),
    ):
        require_same_logits(model, HALF, SAMPLES)
    require_same_logits(model, CPU, SAMPLES)


def test_a_model_with_which_transformers_cannot_compute_is_named(tmp_path: Path) -> None:
    """The kernel for groups of experts needs rows of multiples of 16 bytes."""
    base = save_model(tmp_path / "base", tiny_config("mixtral", intermediate_size=33))
    told = rf"^{base}: transformers cannot compute with this model \(RuntimeError: strides should"
    with pytest.raises(EspalierError, match=told):
        require_same_logits(OpenedModel(base), CPU, SAMPLES)
