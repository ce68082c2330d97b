"""A base model is read as plain transformers reads it, or refused before a run starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from espalier.errors import EspalierError
from espalier.hf.export.model import check_export, export_edited, logits_of
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.base_check import (
    require_finite_weights,
    require_same_encoder,
    require_same_logits,
)
from espalier.hf.opening.disk_model import load_plain
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import llama_config, save_model
from tests.tiny_model import save_tokenizer

SAMPLES = torch.arange(2, 34).view(2, 16)
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
CPU = Computing(torch.device("cpu"), torch.float32, 1)
HALF = Computing(torch.device("cpu"), torch.float16, 1)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def plain_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(SAMPLES).logits.flatten(0, 1)


@torch.no_grad()
def streamed_logits(directory: Path) -> torch.Tensor:
    return torch.cat(list(logits_of(BlockStream(OpenedModel(directory), CPU), SAMPLES, dense)))


def change_tensors(directory: Path, change: Change) -> None:
    save_file(change(load_file(directory / WEIGHTS)), directory / WEIGHTS, {"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    """Change keys of ``config.json``; the value ``...`` removes a key."""
    path = directory / "config.json"
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def with_other_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {HEAD: tensors[EMBEDDING].flip(0).contiguous()}


def under_the_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {HEAD if name == EMBEDDING else name: value for name, value in tensors.items()}


def twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def of_the_base(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def with_old_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), torch.nan)}


# ----- read as transformers does ------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [with_other_head, under_the_head, twice, of_the_base, with_old_buffers]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_tied_tensors_are_those_of_transformers(
    tmp_path: Path, change: Change, sharded: bool
) -> None:
    base = save_model(tmp_path / "base", llama_config(tie_word_embeddings=True))
    change_tensors(base, change)
    if sharded:
        cut_into_two(base)
    expected = plain_logits(base)
    torch.testing.assert_close(streamed_logits(base), expected)
    model = OpenedModel(base)
    require_finite_weights(model, CPU)
    require_same_logits(model, CPU, SAMPLES)
    target = tmp_path / "written"
    export_edited(model, dense, target)
    torch.testing.assert_close(plain_logits(target), expected)
    assert (target / "model.safetensors.index.json").exists() == sharded
    check_export(BlockStream(model, CPU), dense, target, SAMPLES)
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] == (
        change is not with_other_head
    )


def cut_into_two(directory: Path) -> None:
    """Move every other tensor into a second file and write the index."""
    tensors = load_file(directory / WEIGHTS)
    parts = [dict(list(tensors.items())[place::2]) for place in (0, 1)]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file(part, directory / name, {"format": "pt"})
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (directory / WEIGHTS).unlink()


def test_export_leaves_out_an_unread_index(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", llama_config())
    (base / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}'
    )
    export_edited(OpenedModel(base), dense, tmp_path / "written")
    assert not (tmp_path / "written" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("config", "left_out", "heads"),
    [
        (
            MistralConfig(**SIZES, intermediate_size=48, head_dim=2, num_key_value_heads=8),
            "num_key_value_heads",
            (2, 2),
        ),
        (MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=4), "head_dim", (2, 4)),
        (
            Qwen3Config(**SIZES, intermediate_size=48, num_key_value_heads=4, head_dim=128),
            "head_dim",
            (128, 4),
        ),
        (
            Qwen2Config(
                **SIZES | {"hidden_size": 64, "num_attention_heads": 32},
                intermediate_size=48,
                num_key_value_heads=32,
            ),
            "num_key_value_heads",
            (2, 1),
        ),
        (
            llama_config(num_attention_heads=32, num_key_value_heads=16, head_dim=2),
            "num_attention_heads",
            (2, 2),
        ),
        (
            OPTConfig(**SIZES | {"num_attention_heads": 12}, ffn_dim=48, word_embed_proj_dim=32),
            "num_attention_heads",
            None,
        ),
    ],
    ids=["mistral groups", "mistral heads", "qwen3 heads", "qwen2 groups", "llama heads", "opt"],
)
def test_config_defaults_are_transformers_own(
    tmp_path: Path, config: PretrainedConfig, left_out: str, heads: tuple[int, int] | None
) -> None:
    if heads is None:
        config = OPTConfig(
            **SIZES | {"hidden_size": 48, "num_attention_heads": 12},
            ffn_dim=48,
            word_embed_proj_dim=48,
        )
        heads = (4, 1)
    base = save_model(tmp_path / "base", config)
    change_config(base, **{left_out: ...})
    model = OpenedModel(base)
    assert (model.plan.head_dim, model.plan.heads_per_group) == heads
    require_same_logits(model, CPU, SAMPLES)


def test_key_ignored_by_transformers_is_ignored(tmp_path: Path) -> None:
    """OPT has as many groups as heads, whatever a key of another family says."""
    sizes = SIZES | {"num_attention_heads": 4}
    base = save_model(tmp_path / "base", OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32))
    change_config(base, num_key_value_heads=2, rms_norm_eps=7, attention_bias=False)
    require_same_logits(OpenedModel(base), CPU, SAMPLES)


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
@pytest.mark.parametrize("code", ["kernels-community/flash-attn2", "flash_attention_2", "no such"])
def test_code_named_in_config_is_not_fetched(
    tmp_path: Path, key: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model and of an encoder; transformers would ask the hub for it, or fail without it."""
    asked = list[str]()
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.get_kernel",
        lambda name, *_, **__: asked.append(name),
    )
    monkeypatch.setattr("transformers.utils.is_kernels_available", lambda *_, **__: True)
    base = save_model(tmp_path / "base", llama_config())
    change_config(base, **{key: code})
    require_same_logits(OpenedModel(base), CPU, SAMPLES)
    encoder = save_encoder(tmp_path / "encoder", "bert")
    save_tokenizer(encoder)
    change_config(encoder, **{key: code})
    require_same_encoder(OpenedModel(encoder), CPU, 3)
    assert not asked


def float32_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with float32 norms whose bits bfloat16 cannot represent."""
    return {
        name: value.float() + 1e-4 if "norm" in name else value for name, value in tensors.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_model_on_disk_equals_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    """Covers files that hold two dtypes."""
    base = save_model(tmp_path / "base", llama_config(), dtype=torch.bfloat16)
    change_tensors(base, float32_norms)
    found, expected = (
        load_plain(OpenedModel(base), dtype, CPU.device, in_memory=whole)[0]
        for whole in (False, True)
    )
    with torch.no_grad():
        assert torch.equal(found(SAMPLES).logits, expected(SAMPLES).logits)


def test_a_difference_of_reading_is_refused(tmp_path: Path) -> None:
    """Any difference is found; here two tensors of the opened model are exchanged."""
    model = OpenedModel(save_model(tmp_path / "base", llama_config()))
    tensors, (up, gate) = (
        model.checkpoint.tensors,
        (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "gate")),
    )
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    with pytest.raises(
        EspalierError,
        match=r"base: read block by block, .* differ from those of plain transformers by",
    ):
        require_same_logits(model, CPU, SAMPLES)


# ----- refused with a reason ----------------------------------------------------------------------


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
            r"'float32' overflows beyond 3.4028e\+38; no supported dtype can represent them: name another model",
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


# ----- encoders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_an_encoder_is_compared_too(tmp_path: Path, model_type: str) -> None:
    base = save_encoder(tmp_path / "base", model_type)
    save_tokenizer(base)
    model = OpenedModel(base)
    require_finite_weights(model, CPU, 3)
    require_same_encoder(model, CPU, 3)
    name = next(
        name for name in model.checkpoint.tensors if name.endswith("layer.1.output.dense.weight")
    )
    changed = shutil.copytree(base, tmp_path / "changed")
    change_tensors(
        changed, lambda tensors: tensors | {name: torch.full_like(tensors[name], torch.nan)}
    )
    with pytest.raises(EspalierError, match=rf"{name} contains NaN"):
        require_finite_weights(OpenedModel(changed), CPU, 3)
    assert AutoModelForSequenceClassification.from_pretrained(base) is not None
    model.checkpoint.tensors[name] = model.checkpoint.tensors[name.replace("layer.1", "layer.0")]
    with pytest.raises(
        EspalierError, match=r"hidden states differ from those of plain transformers"
    ):
        require_same_encoder(model, CPU, 3)
