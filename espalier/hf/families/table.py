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

QWEN2 = replace(LLAMA, name="qwen2", model_types=("qwen2",), block_keys=("layer_types",))
"""Qwen2 and Qwen2.5: LLaMA's names; the biases of query, key and value are not pruned."""

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_types=("qwen3",),
    norms={**LLAMA.norms, "norm.q": "self_attn.q_norm", "norm.k": "self_attn.k_norm"},
)
"""Dense Qwen3 models: LLaMA's names; the norms of query and key heads are not pruned."""

GRANITE = replace(LLAMA, name="granite", model_types=("granite",))
"""Granite 3: LLaMA's names; the model's own code scales embeddings, residuals and logits."""

SMOLLM3 = replace(
    LLAMA, name="smollm3", model_types=("smollm3",), block_keys=("layer_types", "no_rope_layers")
)
"""SmolLM3: LLaMA's names; some blocks have no rotary embedding."""

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    model_types=("olmo2",),
    norms={
        "norm.q": "self_attn.q_norm",
        "norm.k": "self_attn.k_norm",
        "norm.attn": "post_attention_layernorm",
        "norm.mlp": "post_feedforward_layernorm",
    },
    residual_prunable=False,
    heads_prunable=False,
)
"""OLMo 2: norms after attention and feed-forward part, and one norm for all query or key heads."""

GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    model_types=("gemma2",),
    norms={
        "norm.attn": "input_layernorm",
        "norm.attn.after": "post_attention_layernorm",
        "norm.mlp": "pre_feedforward_layernorm",
        "norm.mlp.after": "post_feedforward_layernorm",
    },
    block_keys=("layer_types",),
)
"""Gemma 2: norms before and after attention and feed-forward part, and soft-capped logits."""

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    model_types=("gemma3_text",),
    norms={**GEMMA2.norms, "norm.q": "self_attn.q_norm", "norm.k": "self_attn.k_norm"},
)
"""Gemma 3 without vision: Gemma 2's names and norms of query and key heads."""

PHI3 = replace(
    LLAMA,
    name="phi3",
    model_types=("phi3",),
    linears={
        "attn.qkv": "self_attn.qkv_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.gateup": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
"""Phi-3, Phi-3.5 and Phi-4: query, key and value are one matrix, and so are gate and up."""

ATTENTION = {name: path for name, path in LLAMA.linears.items() if name.startswith("attn.")}

MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    model_types=("mixtral",),
    linears=ATTENTION,
    residual_prunable=False,
    experts={
        "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
        "mlp.experts.gate_up_proj": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
    },
)
"""Mixtral, of which only attention is tuned."""

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    linears=ATTENTION,
    residual_prunable=False,
    experts={
        "mlp.experts.gate_up_proj": (
            "mlp.experts.{}.gate_proj.weight",
            "mlp.experts.{}.up_proj.weight",
        ),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
    },
)
"""Qwen3 with experts in some or all blocks, of which only attention is tuned."""

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
    GRANITE,
    SMOLLM3,
    OLMO2,
    GEMMA2,
    GEMMA3,
    PHI3,
    MIXTRAL,
    QWEN3_MOE,
    OPT,
    BERT,
    ROBERTA,
)
