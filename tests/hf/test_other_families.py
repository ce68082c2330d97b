"""Mistral, Qwen2, Qwen3 and OPT satisfy the contract of every family."""

from typing import Any, ClassVar

from family_contract import FamilyContract
from tiny_models import VOCABULARY
from transformers import MistralConfig, OPTConfig, PretrainedConfig, Qwen2Config, Qwen3Config

LLAMA_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
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


class TestMistral(FamilyContract):
    """Mistral with a sliding window that is shorter than the text."""

    blocks = "model.layers"
    linears: ClassVar[dict[str, str]] = LLAMA_NAMES
    kv_groups = (2, 2)

    def config(self, **changes: Any) -> PretrainedConfig:
        return MistralConfig(**SIZES | {"sliding_window": 4} | changes)


class TestQwen2(FamilyContract):
    """Qwen2 with query, key and value biases; the second block has a sliding window."""

    blocks = "model.layers"
    linears: ClassVar[dict[str, str]] = LLAMA_NAMES
    kv_groups = (2, 2)

    def config(self, **changes: Any) -> PretrainedConfig:
        return Qwen2Config(
            **SIZES
            | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
            | changes
        )


class TestQwen3(FamilyContract):
    """Qwen3 with norms of query and key, and heads wider than hidden size / number of heads."""

    blocks = "model.layers"
    linears: ClassVar[dict[str, str]] = LLAMA_NAMES
    kv_groups = (2, 2)

    def config(self, **changes: Any) -> PretrainedConfig:
        return Qwen3Config(**SIZES | {"head_dim": 16} | changes)


class TestOpt(FamilyContract):
    """OPT with embeddings narrower than the blocks and projections around them, as in OPT-350m."""

    blocks = "model.decoder.layers"
    linears: ClassVar[dict[str, str]] = {
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    }
    kv_groups = (4, 1)

    def config(self, **changes: Any) -> PretrainedConfig:
        sizes = {
            key: value
            for key, value in SIZES.items()
            if key not in ("intermediate_size", "num_key_value_heads")
        }
        return OPTConfig(
            **sizes | {"ffn_dim": 48, "word_embed_proj_dim": 24, "init_std": 0.2} | changes
        )
