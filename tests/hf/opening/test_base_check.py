"""A base model is read as plain transformers reads it."""

import json
import shutil
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
from espalier.hf.opening.base_check import (
    require_finite_weights,
    require_same_encoder,
    require_same_logits,
)
from espalier.hf.opening.disk_model import load_plain
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from tests.hf.opening.changed_models import (
    CPU,
    EMBEDDING,
    HEAD,
    SAMPLES,
    WEIGHTS,
    Change,
    change_config,
    change_tensors,
)
from tests.hf.tiny_encoders import save_encoder
from tests.hf.tiny_models import (
    OWN_KEYS,
    llama_config,
    save_model,
    tiny_config,
    token_sequences,
    whole_model,
)
from tests.tiny_model import save_tokenizer

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


def plain_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(SAMPLES).logits.flatten(0, 1)


@torch.no_grad()
def streamed_logits(directory: Path) -> torch.Tensor:
    return torch.cat(list(logits_of(BlockStream(OpenedModel(directory), CPU), SAMPLES, dense)))


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


@pytest.mark.parametrize("kind", OWN_KEYS)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_files_may_have_another_dtype_than_the_computation(
    kind: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """Numbers that are in no file, such as Gemma's scale, have the dtype of the computation."""
    base = save_model(tmp_path / "base", tiny_config(kind), stored)
    model = OpenedModel(base)
    samples = token_sequences(4, 9)
    require_same_logits(model, CPU, samples)
    plain, _ = load_plain(model, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        found = plain(input_ids=samples, use_cache=False).logits
        expected = whole_model(base)(input_ids=samples, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
