"""OPT: learned positions, biases everywhere, no gate, one key-value group per head."""

from espalier.hf.families.family import Family

OPT = Family(
    name="opt",
    model_types=("opt",),
    kind="decoder",
    blocks="model.decoder.layers",
    linears={
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    channels_key="ffn_dim",
    kv_heads_key="",
    embeddings="model.decoder.embed_tokens",
    norms={"norm.attn": "self_attn_layer_norm", "norm.mlp": "final_layer_norm"},
    final_norm="model.decoder.final_layer_norm",
)
