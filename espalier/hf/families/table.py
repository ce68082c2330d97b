"""Supported model families. A new family is one more entry of ``FAMILIES``."""

from dataclasses import replace

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
"""LLaMA, LLaMA-2, LLaMA-3 and models of the same architecture."""

MISTRAL = replace(LLAMA, name="mistral", model_types=("mistral",))
"""Mistral 7B and models of the same architecture.

The model's own code handles sliding-window attention.
"""

QWEN2 = replace(LLAMA, name="qwen2", model_types=("qwen2",))
"""Qwen2 and Qwen2.5: LLaMA's names; the biases of query, key and value are not pruned."""

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    model_types=("qwen3",),
    norms={**LLAMA.norms, "norm.q": "self_attn.q_norm", "norm.k": "self_attn.k_norm"},
)
"""Dense Qwen3 models: LLaMA's names; the norms of query and key heads are not pruned."""

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
    packs=False,
)
"""OPT: learned positions, biases everywhere, no gate, one key-value group per head."""

BERT = Family(
    name="bert",
    model_types=("bert",),
    kind="encoder",
    kv_heads_key="",
    blocks="bert.encoder.layer",
    linears={
        "attn.q": "attention.self.query",
        "attn.k": "attention.self.key",
        "attn.v": "attention.self.value",
        "attn.o": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    },
    embeddings="bert.embeddings",
    head="classifier",
    base="bert",
    norms={"norm.attn": "attention.output.LayerNorm", "norm.mlp": "output.LayerNorm"},
    head_linears={"head.dense": "bert.pooler.dense", "head.out": "classifier"},
)
"""BERT for sequence classification. The pooler is part of the head.

Files of a masked language model have no pooler; if there is one, tuning starts from it.
"""

ROBERTA = replace(
    BERT,
    name="roberta",
    model_types=("roberta", "xlm-roberta"),
    blocks="roberta.encoder.layer",
    embeddings="roberta.embeddings",
    base="roberta",
    first_position_after_padding=True,
    head_linears={"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
)
"""RoBERTa and XLM-RoBERTa for sequence classification: BERT's blocks and a separate head."""

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OPT,
    BERT,
    ROBERTA,
)
