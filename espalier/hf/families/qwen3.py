"""Dense Qwen3 models: LLaMA's names; the norms of query and key heads are not pruned."""

from dataclasses import replace

from espalier.hf.families.llama import LLAMA

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    model_types=("qwen3",),
    norms={**LLAMA.norms, "norm.q": "self_attn.q_norm", "norm.k": "self_attn.k_norm"},
)
