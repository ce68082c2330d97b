"""LLaMA satisfies the contract of every family."""

from typing import Any, ClassVar

from transformers import PretrainedConfig

from tests.hf.families.family_contract import FamilyContract
from tests.hf.tiny_models import llama_config


class TestLlama(FamilyContract):
    blocks = "model.layers"
    linears: ClassVar[dict[str, str]] = {
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    kv_groups = (2, 2)

    def config(self, **changes: Any) -> PretrainedConfig:
        return llama_config(**changes)


class TestLlamaWithBiases(TestLlama):
    """LLaMA with biases, which stay dense and count as such."""

    def config(self, **changes: Any) -> PretrainedConfig:
        return llama_config(attention_bias=True, mlp_bias=True, **changes)
