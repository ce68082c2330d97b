"""Tiny random models on disk with a tokenizer; no network, a few milliseconds each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from espalier.hf.machine.computing import Computing

VOCABULARY = 96
CPU = Computing(torch.device("cpu"), torch.float32, 1)


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def llama_config(**changes: Any) -> LlamaConfig:
    """Return a configuration with three blocks of width 32, four query heads and two groups."""
    return LlamaConfig(**SIZES | {"num_hidden_layers": 3} | changes)


WINDOW: dict[str, Any] = {"sliding_window": 4}
GEMMA = WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window_pattern": 2}
OWN_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "smollm3": {
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "olmo2": {"eos_token_id": 0},
    "gemma2": GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": GEMMA,
    "phi3": {"pad_token_id": 0, "eos_token_id": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2},
}
"""Keys of a tiny configuration that other families lack, by model type of decoders.

Windows are shorter than the text, and blocks are not all alike.
"""
LONG: dict[str, Any] = {
    "original_max_position_embeddings": 3,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.0, 2.0, 4.0],
        "original_max_position_embeddings": 3,
    },
}
"""Keys of Phi models with other rotary embeddings for texts of more than 3 tokens."""
MIXTURES = ("mixtral", "qwen3_moe")
DENSE = tuple(kind for kind in OWN_KEYS if kind not in MIXTURES)


def tiny_config(kind: str, **changes: Any) -> PretrainedConfig:
    """Return a configuration of a model type with two blocks of width 32."""
    return AutoConfig.for_model(kind, **SIZES | OWN_KEYS[kind] | changes)


def random_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model in evaluation mode with random weights, norms and biases."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def save_model(
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> Path:
    """Save a random model and a word-level tokenizer with the words ``w0``, ``w1``, ..."""
    random_model(config, dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Save a word-level tokenizer with the words ``w0``, ``w1``, ..."""
    words = Tokenizer(
        WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)


def whole_model(directory: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model as any user of transformers loads it, on the CPU.

    Code of the directory runs if its configuration names some. Without ``device_map`` transformers
    puts a model in NF4 on a CUDA device.
    """
    remote = "auto_map" in json.loads((directory / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=dtype, device_map="cpu", trust_remote_code=remote
    ).eval()


def token_sequences(samples: int, tokens: int, seed: int = 5) -> Tensor:
    """Return random token ids of shape (samples, tokens), int64."""
    return torch.randint(
        VOCABULARY, (samples, tokens), generator=torch.Generator().manual_seed(seed)
    )


def random_masks(shapes: Mapping[str, tuple[int, ...]], block: int) -> dict[str, Tensor]:
    """Return a mask for each name with about 40% of the elements set, different in each block."""
    generator = torch.Generator().manual_seed(100 + block)
    return {name: torch.rand(shape, generator=generator) < 0.4 for name, shape in shapes.items()}
