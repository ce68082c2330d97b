"""Settings that exceed the limits of a model are refused; transformers has the same limits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import OPTConfig

from espalier.errors import EspalierError
from espalier.hf.opening.base_check import require_within_limits, sequence_lengths
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from tests.hf.tiny_encoders import SIZES, save_encoder
from tests.hf.tiny_models import VOCABULARY, llama_config, save_model

TUNING = {"method": "fedpetuning"}
ON_ITEMS = TUNING | {"task.name": "sst2", "data.source": "files", "data.path": "items.jsonl"}
SHORT = {"data.sequence-length": 64, "evaluation.sequence-length": 64, "task.max-tokens": 64}


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """LLaMA with 64 positions, 96 embeddings and a tokenizer of 96 words."""
    return save_model(tmp_path / "decoder", llama_config())


def lines(directory: Path, settings: dict[str, Any]) -> list[str]:
    try:
        require_within_limits(parse(settings), OpenedModel(directory))
    except EspalierError as mistake:
        return str(mistake).splitlines()
    return []


@pytest.mark.parametrize("method", ["fedprllm", "fedspallm", "fedpetuning", "hetlora"])
def test_all_overlong_windows_are_told_at_once(decoder: Path, method: str) -> None:
    assert lines(decoder, SHORT | {"method": method}) == []
    rest = (
        "the model has 64 positions (max_position_embeddings in its config.json); set it to 64 or"
        " less"
    )
    assert lines(
        decoder,
        SHORT | {"method": method, "data.sequence-length": 65, "evaluation.sequence-length": 66},
    ) == [
        f"evaluation.sequence-length = 66: {rest}",
        f"data.sequence-length = 65: {rest}",
    ]


@pytest.mark.parametrize(
    ("settings", "encoder", "keys"),
    [
        ({}, False, {"data.sequence-length", "evaluation.sequence-length"}),
        (TUNING, False, {"data.sequence-length", "evaluation.sequence-length"}),
        (ON_ITEMS, False, {"evaluation.sequence-length", "task.max-tokens"}),
        (ON_ITEMS, True, {"task.max-tokens"}),
    ],
)
def test_only_what_the_run_uses_is_looked_at(
    settings: dict[str, Any], encoder: bool, keys: set[str]
) -> None:
    assert sequence_lengths(parse(settings), encoder).keys() == keys


@pytest.mark.parametrize(
    ("kind", "longest"), [("opt", 64), ("bert", 64), ("roberta", 62), ("xlm-roberta", 62)]
)
def test_learned_positions_end_as_stated(tmp_path: Path, kind: str, longest: int) -> None:
    """transformers accepts the same lengths and none longer.

    RoBERTa counts positions from 2, and so does OPT, but the table of OPT is longer by 2.
    """
    auto_class = "AutoModelForCausalLM" if kind == "opt" else "AutoModelForMaskedLM"
    if kind == "opt":
        sizes = {
            key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        }
        config = OPTConfig(
            **sizes,
            vocab_size=VOCABULARY,
            ffn_dim=48,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        )
        save_model(tmp_path, config)
    else:
        save_encoder(tmp_path, kind)
    assert OpenedModel(tmp_path).num_positions == longest
    whole = getattr(transformers, auto_class).from_pretrained(tmp_path)
    whole(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        whole(input_ids=torch.full((1, longest + 1), 5))


def test_missing_limits_are_transformers_defaults(decoder: Path) -> None:
    """The defaults of LlamaConfig are 2048 positions and 32000 embeddings."""
    config = json.loads((decoder / "config.json").read_text())
    del config["max_position_embeddings"]
    (decoder / "config.json").write_text(json.dumps(config))
    assert OpenedModel(decoder).num_positions == 2048
    assert len(lines(decoder, SHORT | {"data.sequence-length": 2049})) == 1


def test_tokens_without_an_embedding_are_refused(decoder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
    tokenizer.add_tokens(["one-more"])
    tokenizer.save_pretrained(decoder)
    assert lines(decoder, SHORT) == [
        f"{decoder}: its tokenizer has token ids up to 96, but the model has 96 embeddings"
        " (vocab_size in its config.json); replace the tokenizer by the one with which the"
        " model was trained"
    ]


def test_embeddings_without_tokens_are_allowed(decoder: Path, tmp_path: Path) -> None:
    """Models often have more embeddings than tokens, for example a multiple of 64."""
    wider = save_model(tmp_path / "wider", llama_config(vocab_size=VOCABULARY + 32))
    shutil.copy(decoder / "tokenizer.json", wider)
    assert lines(wider, SHORT) == []
