"""RoBERTa encoders of random weights on disk, bf16: for measuring what does not depend on the values."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import RobertaConfig, RobertaForMaskedLM


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder."""

    vocabulary: int
    hidden: int
    feed_forward: int
    blocks: int
    heads: int


SHAPES = {
    "roberta-base": Shape(50265, 768, 3072, 12, 12),
    "roberta-large": Shape(50265, 1024, 4096, 24, 16),
}
"""Those of Liu et al. 2019, without their tokenizer."""


def save_model(folder: Path, shape: Shape) -> None:
    """Write an encoder, with weights from a seed of its own."""
    config = RobertaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads, max_position_embeddings=514,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        RobertaForMaskedLM(config).to(torch.bfloat16).save_pretrained(folder)
