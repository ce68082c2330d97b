"""LLaMA models with random weights in bf16 on disk, a shard per block.

They serve for measurements that do not depend on the values.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import espalier_assets

VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    feed_forward: int
    blocks: int
    heads: int
    kv_heads: int


SHAPES = {
    "0.1b": Shape(768, 2048, 12, 12, 12),
    "1.1b": Shape(2048, 5632, 22, 32, 4),
    "2.1b": Shape(2560, 6912, 27, 20, 20),
    "7b": Shape(4096, 11008, 32, 32, 32),
}
"""Sizes of the models; ``1.1b`` is TinyLlama and ``7b`` LLaMA-7B."""


def save_model(folder: Path, shape: Shape) -> None:
    """Write a model; all blocks have the same weights, which saves the time to draw them."""
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, vocab_size=VOCABULARY, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    for file in Path(espalier_assets.__file__).parent.glob("demo/tokenizer*"):
        shutil.copy(file, folder)
    block = {name: _drawn(size) for name, size in _block(shape).items()}
    index: dict[str, str] = {}
    for number in range(shape.blocks):
        _save(
            folder,
            f"model-{number:05d}",
            {f"model.layers.{number}.{name}": value for name, value in block.items()},
            index,
        )
    embeddings = {
        "model.embed_tokens.weight": _drawn((VOCABULARY, shape.hidden)),
        "model.norm.weight": _drawn((shape.hidden,)),
    }
    _save(folder, "model-embeddings", embeddings, index)
    _save(folder, "model-head", {"lm_head.weight": _drawn((VOCABULARY, shape.hidden))}, index)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def _block(shape: Shape) -> dict[str, tuple[int, ...]]:
    key_value = shape.hidden * shape.kv_heads // shape.heads
    return {
        "self_attn.q_proj.weight": (shape.hidden, shape.hidden),
        "self_attn.k_proj.weight": (key_value, shape.hidden),
        "self_attn.v_proj.weight": (key_value, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, shape.hidden),
        "mlp.gate_proj.weight": (shape.feed_forward, shape.hidden),
        "mlp.up_proj.weight": (shape.feed_forward, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.feed_forward),
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
    }


def _drawn(size: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(size) * 0.02 if len(size) > 1 else torch.ones(size)
    return drawn.to(torch.bfloat16)


def _save(
    folder: Path, shard: str, tensors: dict[str, torch.Tensor], index: dict[str, str]
) -> None:
    save_file(tensors, folder / f"{shard}.safetensors")
    index.update(dict.fromkeys(tensors, f"{shard}.safetensors"))
