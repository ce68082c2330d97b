"""RoBERTa encoders with random weights in bf16, for measurements that do not depend on values."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import RobertaConfig, RobertaForMaskedLM


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder."""

    vocabulary: int
    hidden: int
    feed_forward: int
    blocks: int
    heads: int


SHAPES = {
    "roberta-base": Shape(50265, 768, 3072, 12, 12),
    "roberta-large": Shape(50265, 1024, 4096, 24, 16),
}
"""Sizes of Liu et al. 2019; the models have no tokenizer."""


def save_model(folder: Path, shape: Shape) -> None:
    """Write an encoder with random weights from a fixed seed."""
    config = RobertaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads,
        max_position_embeddings=514,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        RobertaForMaskedLM(config).to(torch.bfloat16).save_pretrained(folder)
