"""All decoder families except LLaMA satisfy the contract of every family."""

from typing import Any, ClassVar

from transformers import PretrainedConfig

from tests.hf.families.family_contract import FamilyContract
from tests.hf.tiny_models import LONG, tiny_config

LLAMA_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class OtherFamily(FamilyContract):
    """Contract of a family whose tiny configuration has an entry in ``OWN_KEYS``."""

    kind: ClassVar[str]
    blocks = "model.layers"
    linears: ClassVar[dict[str, str]] = LLAMA_NAMES
    kv_groups = (2, 2)

    def config(self, **changes: Any) -> PretrainedConfig:
        return tiny_config(self.kind, **changes)


class TestMistral(OtherFamily):
    """Mistral with a sliding window that is shorter than the text."""

    kind = "mistral"


class TestQwen2(OtherFamily):
    """Qwen2 with query, key and value biases; the second block has a sliding window."""

    kind = "qwen2"


class TestQwen3(OtherFamily):
    """Qwen3 with norms of query and key, and heads wider than hidden size / number of heads."""

    kind = "qwen3"


class TestLlama3(OtherFamily):
    """LLaMA 3 with scaled rotary embeddings."""

    kind = "llama"

    def config(self, **changes: Any) -> PretrainedConfig:
        scaled = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        return super().config(rope_parameters=scaled, **changes)


class TestGranite(OtherFamily):
    """Granite with multipliers of embeddings, attention, residuals and logits."""

    kind = "granite"


class TestSmolLM3(OtherFamily):
    """SmolLM3 with a second block without rotary embedding."""

    kind = "smollm3"


class TestOlmo2(OtherFamily):
    """OLMo 2 with norms after attention and feed-forward part, and of all query or key heads."""

    kind = "olmo2"


class TestGemma2(OtherFamily):
    """Gemma 2 with a sliding window in the first block, and soft caps of attention and logits."""

    kind = "gemma2"


class TestGemma3(OtherFamily):
    """Gemma 3 with a sliding window and other rotary embeddings in the first block."""

    kind = "gemma3_text"


class TestPhi3(OtherFamily):
    """Phi-3 with one matrix for query, key and value, and one for gate and up."""

    kind = "phi3"
    linears: ClassVar[dict[str, str]] = {
        "attn.qkv": "self_attn.qkv_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.gateup": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    }


class TestPhi4(TestPhi3):
    """Phi-4 mini, whose rotary embeddings differ for texts of more than 3 tokens."""

    def config(self, **changes: Any) -> PretrainedConfig:
        return super().config(**LONG | changes)


class MixtureOfExperts(OtherFamily):
    """Contract of a mixture of experts, of which only attention has canonical names."""

    linears: ClassVar[dict[str, str]] = {
        name: path for name, path in LLAMA_NAMES.items() if name.startswith("attn.")
    }
    part = "self_attn."


class TestMixtral(MixtureOfExperts):
    """Mixtral, whose files name router and experts otherwise than transformers."""

    kind = "mixtral"


class TestQwen3Moe(MixtureOfExperts):
    """Qwen3 with experts, except in the first block."""

    kind = "qwen3_moe"


class TestOpt(OtherFamily):
    """OPT with embeddings narrower than the blocks and projections around them, as in OPT-350m."""

    kind = "opt"
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
        return super().config(word_embed_proj_dim=24, **changes)
