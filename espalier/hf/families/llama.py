"""LLaMA, LLaMA-2, LLaMA-3 and models of the same architecture."""

from espalier.hf.families.family import Family

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    kind="decoder",
    blocks="model.layers",
    linears={
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    norms={"norm.attn": "input_layernorm", "norm.mlp": "post_attention_layernorm"},
    residual_prunable=True,
    final_norm="model.norm",
)
