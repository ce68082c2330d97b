"""Model sizes computed without weights: published models, and tiny ones against loaded models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    RobertaConfig,
)

from benchmarks.models.footprint import Footprint, footprint
from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4.matrices import bitsandbytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.model import Base, load_whole
from tests.hf.tiny_encoders import ENCODERS, encoder_config, save_encoder
from tests.hf.tiny_models import llama_config, save_model

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
OPT_125M = OPTConfig(
    vocab_size=50272, hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12
)
LLAMA3 = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8
)
QWEN2 = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
ROBERTA = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)

PUBLISHED: list[tuple[str, PretrainedConfig, int | None, float]] = [
    ("LLaMA-7B", LlamaConfig(), None, 6.738e9),
    ("LLaMA3-8B", LLAMA3, None, 8.030e9),
    ("Qwen2-7B", QWEN2, None, 7.616e9),
    ("Mistral-7B-v0.3", MistralConfig(vocab_size=32768), None, 7.248e9),
    ("OPT-125M", OPT_125M, None, 125.2e6),
    ("RoBERTa-base", ROBERTA, 2, 124.6e6),
    ("BERT-base", BertConfig(), 2, 109.5e6),
]


@pytest.mark.parametrize(("name", "config", "num_labels", "published"), PUBLISHED)
def test_totals_of_published_models(
    name: str, config: PretrainedConfig, num_labels: int | None, published: float
) -> None:
    assert footprint(config.to_dict(), num_labels).parameters == pytest.approx(
        published, rel=0.0005
    )


def test_llama_7b_on_paper() -> None:
    """32 blocks of width 4096 with 11008 FFN channels, and a vocabulary of 32000."""
    found = footprint(LlamaConfig().to_dict())
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert (found.linears, found.embeddings, found.head) == (linears, 32000 * 4096, 32000 * 4096)
    assert found.others == (2 * 32 + 1) * 4096
    rest = 2 * 32000 * 4096 + 65 * 4096
    assert found.weight_bytes("float32") == 4 * (linears + rest)
    assert found.weight_bytes("bfloat16") == 2 * (linears + rest)
    scales = linears // 64
    groups = 32 * (4 * (4096**2 // 64 // 256) + 3 * (4096 * 11008 // 64 // 256))
    nf4 = linears // 2 + scales + 4 * groups + 4 * 7 * 32 + 4 * (16 + 256)
    assert found.weight_bytes("nf4") == nf4 + 2 * rest
    assert found.weight_bytes("nf4", torch.float32) == nf4 + 4 * rest
    assert (
        found.weight_bytes("nf4", double_quantisation=False)
        == linears // 2 + 4 * scales + 4 * 16 + 2 * rest
    )


def test_roberta_on_paper() -> None:
    """12 blocks of width 768; the head is float32 for every base dtype."""
    found = footprint(ROBERTA.to_dict(), 3)
    assert found.linears == 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert found.embeddings == (50265 + 514 + 1 + 2) * 768
    assert found.head == 768**2 + 768 + 3 * 768 + 3
    assert found.others == 12 * (4 * 768 + 3072 + 768 + 4 * 768)
    assert found.weight_bytes("bfloat16") == 2 * (found.parameters - found.head) + 4 * found.head


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a loaded model's weights.

    Parameters count once, with the scales and tables of quantised ones; shared tables count once.
    """
    tensors = list(model.parameters())
    for module in model.modules():
        if isinstance(module, bitsandbytes().nn.Linear4bit):
            state = module.weight.quant_state
            tensors += [state.absmax, state.code]
            tensors += (
                [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
            )
    return sum(size for _, size in {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors})


BASES: list[tuple[Base, torch.dtype]] = [
    ("float32", torch.float32),
    ("bfloat16", torch.float32),
    ("nf4", torch.float32),
    ("nf4", torch.bfloat16),
]


def compare(
    found: Footprint,
    directory: Path,
    num_labels: int | None,
    base: Base,
    dtype: torch.dtype,
) -> None:
    computing = Computing(torch.device("cpu"), dtype, 1)
    whole = load_whole(OpenedModel(directory), computing, base, num_labels=num_labels)
    assert found.weight_bytes(base, dtype) == bytes_of(whole)


@pytest.mark.parametrize(("base", "dtype"), BASES)
@pytest.mark.parametrize("tie", [False, True])
def test_bytes_are_those_of_a_loaded_decoder(
    tie: bool, base: Base, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = llama_config(**WIDE, tie_word_embeddings=tie, attention_bias=True)
    found = footprint(config.to_dict())
    assert found.head == (0 if tie else 96 * 64)
    compare(found, save_model(tmp_path, config), None, base, dtype)


@pytest.mark.parametrize(("base", "dtype"), BASES)
@pytest.mark.parametrize("model_type", ENCODERS)
def test_bytes_are_those_of_a_loaded_encoder(
    model_type: str, base: Base, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = footprint(encoder_config(model_type, **WIDE).to_dict(), 3)
    compare(found, save_encoder(tmp_path, model_type, **WIDE), 3, base, dtype)


def test_configuration_alone_is_enough(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    assert footprint(tmp_path) == footprint(llama_config().to_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# ----- refusals -----------------------------------------------------------------------------------


def test_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=r"has no config.json; name the directory"):
        footprint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(EspalierError, match=r"config.json: contains a JSON list"):
        footprint(tmp_path)


def test_what_cannot_be_loaded_is_not_counted() -> None:
    with pytest.raises(
        EspalierError, match="the configuration: model_type = 'mamba' is not supported"
    ):
        footprint({"model_type": "mamba"})
    with pytest.raises(EspalierError, match="an encoder"):
        footprint(ROBERTA.to_dict())
    with pytest.raises(EspalierError, match="a decoder"):
        footprint(llama_config().to_dict(), 2)
    with pytest.raises(EspalierError, match="the configuration: transformers cannot"):
        footprint(llama_config().to_dict() | {"hidden_size": "wide"})


def test_unquantisable_rows_have_no_nf4_size() -> None:
    found = footprint(json.loads(json.dumps(llama_config().to_dict(), default=str)))
    assert found.weight_bytes("bfloat16") == 2 * found.parameters
    with pytest.raises(EspalierError, match="32 input features"):
        found.weight_bytes("nf4")
