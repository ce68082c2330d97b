"""Structures of tiny models of every family, and their reference: whole models with zeros."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.structure import Structure
from tests.hf.tiny_encoders import encoder_config, save_encoder
from tests.hf.tiny_models import DENSE, save_model, tiny_config

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
DECODERS: dict[str, PretrainedConfig] = {
    **{kind: tiny_config(kind, **SIZES) for kind in DENSE if kind not in ("qwen2", "opt")},
    "llama with biases": tiny_config(
        "llama", **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": tiny_config("qwen2", **SIZES, max_window_layers=2),
    "opt": tiny_config("opt", num_hidden_layers=4, word_embed_proj_dim=24),
}
ENCODERS = ("bert", "roberta", "xlm-roberta")
WITH_RESIDUAL = tuple(name for name in DECODERS if name not in ("olmo2", "opt"))
"""Families whose residual dimensions can be cut."""


def save(folder: Path, name: str) -> Path:
    """Save a tiny model of a family in several shards."""
    if name in ENCODERS:
        return save_encoder(folder, name, num_hidden_layers=4)
    return save_model(folder, DECODERS[name], max_shard_size="40KB")


def config_of(name: str) -> PretrainedConfig:
    """Return the configuration of the tiny model of this name."""
    return encoder_config(name, num_hidden_layers=4) if name in ENCODERS else DECODERS[name]


def uneven(model: OpenedModel, drop: bool = True, residual: bool = False) -> Structure:
    """Return a structure with different groups in each block and, by default, without block 1.

    It keeps all heads of a family from which none can be removed.
    """
    whole = Structure.whole(model.plan)
    groups = whole.base[0].groups
    width = whole.base[0].attn_reads
    kept: dict[int, dict[str, list[int]]] = {
        0: {"groups": list(range(1, groups)), "channels": list(range(0, 48, 3))},
        2: {"groups": [0], "channels": [5, 6, 7, 40, 47]},
        3: {"channels": list(range(10, 48))},
    }
    if not model.family.heads_prunable:
        kept = {index: {"channels": own["channels"]} for index, own in kept.items()}
    if residual:
        for index, numbers in (
            (0, range(0, width, 2)),
            (2, range(5, width)),
            (3, range(width - 3)),
        ):
            kept[index] |= {"attn_reads": list(numbers), "mlp_writes": list(numbers)}
            kept[index] |= {
                "attn_writes": list(range(index, width)),
                "mlp_reads": list(range(1, width - index)),
            }
    cut = whole.keeping(kept)
    return cut.with_blocks([0, 2, 3]) if drop else cut


@torch.no_grad()
def masked(whole: Any, model: OpenedModel, structure: Structure) -> Any:
    """Return the whole model with zeros for everything that the structure cuts.

    Weights are zeroed group by group and dimension by dimension; dropped blocks are removed.
    """
    family = model.family
    plan = model.plan
    blocks = whole.get_submodule(family.blocks)
    heads = plan.heads_per_group
    head_dim = plan.head_dim
    for block in structure.blocks:
        linears = {
            name: blocks[block.source].get_submodule(path) for name, path in family.linears.items()
        }
        units = structure.base[block.source]
        for group in set(range(units.groups)) - set(block.groups):
            for head in range(group * heads, (group + 1) * heads):
                linears["attn.o"].weight[:, head * head_dim : (head + 1) * head_dim] = 0
        for channel in set(range(units.channels)) - set(block.channels):
            linears["mlp.down"].weight[:, channel] = 0
        for number in set(range(units.attn_reads)) - set(block.attn_reads):
            for name in linears.keys() & {"attn.q", "attn.k", "attn.v", "attn.qkv"}:
                linears[name].weight[:, number] = 0
        for number in set(range(units.mlp_reads)) - set(block.mlp_reads):
            for name in linears.keys() & {"mlp.gate", "mlp.up", "mlp.gateup"}:
                linears[name].weight[:, number] = 0
        for name, kept in (("attn.o", block.attn_writes), ("mlp.down", block.mlp_writes)):
            for number in set(range(linears[name].weight.shape[0])) - set(kept):
                linears[name].weight[number] = 0
                if linears[name].bias is not None:
                    linears[name].bias[number] = 0
    stay = [blocks[block.source] for block in structure.blocks]
    parent, _, last = family.blocks.rpartition(".")
    setattr(whole.get_submodule(parent), last, nn.ModuleList(stay))
    number_anew(whole, stay, [block.source for block in structure.blocks])
    return whole


def number_anew(whole: Any, stay: list[nn.Module], sources: list[int]) -> None:
    """Renumber the remaining blocks; a KV cache finds their keys and values by this index."""
    whole.config.num_hidden_layers = len(stay)
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = [whole.config.layer_types[source] for source in sources]
    for index, block in enumerate(stay):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
