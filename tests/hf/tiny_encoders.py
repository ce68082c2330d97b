"""Tiny random encoders on disk, as language models, bare or already tuned; without a tokenizer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from tests.hf.tiny_models import VOCABULARY

ENCODERS = ["bert", "roberta", "xlm-roberta"]
LINEARS = {
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "initializer_range": 0.2,
}


def encoder_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return a configuration with two blocks of width 32 and four heads."""
    return AutoConfig.for_model(model_type, **SIZES | changes)


def save_encoder(
    directory: Path, model_type: str, stored_as: str = "AutoModelForMaskedLM", **changes: Any
) -> Path:
    """Save a random encoder as this transformers class stores it, with random norms and biases."""
    with torch.random.fork_rng():
        torch.manual_seed(13)
        model = getattr(transformers, stored_as).from_config(
            encoder_config(model_type, **changes), dtype=torch.float32
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "LayerNorm" in name or name.endswith("bias"):
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory
