"""Cosines of block ranges against transformers' hidden states, with and without the final norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, PretrainedConfig, Qwen3Config

from espalier.hf.group_scores.streamline import most_similar_stretch, stretch_cosines
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from tests.hf.tiny_models import (
    CPU,
    VOCABULARY,
    llama_config,
    random_model,
    save_model,
    save_tokenizer,
    token_sequences,
    whole_model,
)

OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 32,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip


def by_loop(hidden: list[Tensor], span: int) -> list[float]:
    """Return the mean cosine of each range of blocks, computed token by token."""
    found = []
    for start in range(len(hidden) - span):
        pairs = zip(
            hidden[start].flatten(0, 1).double(),
            hidden[start + span].flatten(0, 1).double(),
            strict=True,
        )
        own = [float(one @ other / (one.norm() * other.norm())) for one, other in pairs]
        found.append(sum(own) / len(own))
    return found


@torch.no_grad()
def hidden_states(directory: Path, samples: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden states of transformers, and the same with the last block's own output."""
    model = whole_model(directory)
    last = list[Tensor]()
    decoder = model.get_decoder()
    decoder.layers[-1].register_forward_hook(
        lambda _, args, output: last.append(output if isinstance(output, Tensor) else output[0])
    )
    published = list(
        model(input_ids=samples, output_hidden_states=True, use_cache=False).hidden_states
    )
    return published, [*published[:-1], last[0]]


@pytest.mark.parametrize(
    "config",
    [
        llama_config(),
        Qwen3Config(**QWEN3),
        OPTConfig(**OPT),
        OPTConfig(**OPT, do_layer_norm_before=False),
    ],
    ids=["llama", "qwen3", "opt", "opt without a final norm"],
)
@pytest.mark.parametrize("span", [1, 2, 3])
def test_cosines_equal_those_of_transformers(
    tmp_path: Path, config: PretrainedConfig, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences pass in two batches."""
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 16)
    directory = save_model(tmp_path / "model", config)
    samples = token_sequences(3, 8)
    stream = BlockStream(OpenedModel(directory), CPU)
    published, before_norm = hidden_states(directory, samples)
    for after_norm, hidden in ((True, published), (False, before_norm)):
        found = stretch_cosines(stream, samples, span, after_norm=after_norm)
        assert found.tolist() == pytest.approx(by_loop(hidden, span), rel=1e-4, abs=1e-5)
    assert all(value.is_meta for value in stream._skeleton.parameters())


def test_final_norm_decides_on_last_block(tmp_path: Path) -> None:
    """The last block adds nothing, but the final norm turns the sign of half the dimensions.

    The block before it adds little.
    """
    model = random_model(llama_config())
    with torch.no_grad():
        for index, scale in ((1, 1e-2), (2, 0.0)):
            block = model.get_submodule(f"model.layers.{index}")
            for path in ("self_attn.o_proj", "mlp.down_proj"):
                block.get_parameter(f"{path}.weight").mul_(scale)
        model.get_parameter("model.norm.weight").copy_(torch.tensor([1.0, -1.0]).repeat(16))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    save_tokenizer(tmp_path)
    stream = BlockStream(OpenedModel(tmp_path), CPU)
    samples = token_sequences(2, 8)
    before_norm = stretch_cosines(stream, samples, 1, after_norm=False)
    assert most_similar_stretch(before_norm) == 2
    assert float(before_norm[2]) == pytest.approx(1.0)
    assert most_similar_stretch(stretch_cosines(stream, samples, 1, after_norm=True)) == 1
