"""Qwen2 and Qwen2.5: LLaMA's names; the biases of query, key and value are not pruned."""

from dataclasses import replace

from espalier.hf.families.llama import LLAMA

QWEN2 = replace(LLAMA, name="qwen2", model_types=("qwen2",))
