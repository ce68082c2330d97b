"""Tiny models as NF4 directories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OPTConfig, PretrainedConfig, Qwen2Config

from espalier.hf.nf4.cache import quantised_linears
from espalier.hf.nf4.folder import write_quantised
from espalier.hf.nf4.matrices import bitsandbytes, quantise
from espalier.hf.opening.opened_model import OpenedModel
from tests.hf.tiny_models import VOCABULARY, llama_config

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SIZES: dict[str, Any] = WIDE | {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
OPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": llama_config(**WIDE),
    "llama tied, with biases": llama_config(
        **WIDE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": Qwen2Config(
        **SIZES,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    ),
    "opt": OPTConfig(**OPT_SIZES),
    "opt with projections": OPTConfig(**OPT_SIZES, word_embed_proj_dim=24),
}
MATRIX = "model.layers.0.mlp.down_proj.weight"


def written(directory: Path, target: Path, double: bool) -> Path:
    write_quantised(OpenedModel(directory), target, double)
    return target


def plainly_loaded(folder: Path) -> Any:
    """Load the model as any user of transformers does.

    Only the repacking on CPUs with AVX512-BF16 is switched off (see ``linear_of``).
    """
    found, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    for module in four_bit(found).values():
        module.support_avx512bf16_for_cpu = False
    return found.eval()


def four_bit(whole: nn.Module) -> dict[str, Any]:
    return {
        path: module
        for path, module in whole.named_modules()
        if isinstance(module, bitsandbytes().nn.Linear4bit)
    }


def linears_of(model: OpenedModel) -> list[str]:
    return [linear.parameter for block in model.plan.blocks for linear in block.linears]


def handed_out(model: OpenedModel, cache: Path | None = None) -> dict[str, dict[str, Tensor]]:
    return {
        linear.parameter: matrix.tensors for linear, matrix in quantised_linears(model, CPU, cache)
    }


def quantised_anew(model: OpenedModel, double: bool) -> dict[str, dict[str, Tensor]]:
    """Quantise each matrix again from the float32 values of the files."""
    shapes = {
        linear.parameter: linear.shape for block in model.plan.blocks for linear in block.linears
    }
    tensors = load_file(model.directory / "model.safetensors")
    return {
        name: quantise([tensors[name].float().flatten()], shape, CPU, double).tensors
        for name, shape in shapes.items()
    }


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return list(one) == list(other) and all(
        one[key].keys() == other[key].keys()
        and all(torch.equal(tensor, other[key][part]) for part, tensor in one[key].items())
        for key in one
    )


Change = Callable[[dict[str, Tensor]], None]


def other(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    def changed(tensors: dict[str, Tensor]) -> None:
        name = f"{MATRIX}.{part}" if part else MATRIX
        tensors[name] = change(tensors[name]).contiguous()

    return changed
