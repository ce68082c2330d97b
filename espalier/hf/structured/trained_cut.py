"""Removal of prunable groups from trained tensors: adapters, and tensors that are trained whole.

A LoRA update is ``scaling * B A``. If columns of the matrix are removed, the same columns of A are
removed. If rows are removed, the same rows of B are removed. The update of the smaller adapter is
therefore a slice of the update of the larger one, and no value changes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from espalier.models.adapters import Adapter, AdapterPlan, Tensors
from espalier.models.plan import ModelPlan, block_key, block_of_key
from espalier.models.structure import (
    COLUMNS,
    ROWS,
    BlockStructure,
    Structure,
    kept_indices,
    structured_plan,
)

SIDES = {
    "lora_a": (None, COLUMNS), "lora_b": (ROWS, None), "weight": (ROWS, COLUMNS), "bias": (ROWS,),
}  # fmt: skip
"""Kind of prunable group of each dimension of a matrix's tensor, by the suffix of its name."""


def cut_adapter_plan(adapters: AdapterPlan, plan: ModelPlan, structure: Structure) -> AdapterPlan:
    """Return the adapters of a pruned model: blocks are renumbered, ranks and scalings stay."""
    smaller = structured_plan(plan, structure)
    blocks = dict[int, tuple[Adapter, ...]]()
    for index, block in enumerate(structure.blocks):
        if own := adapters.blocks.get(block.source):
            blocks[index] = tuple(
                replace(one, linear=smaller.blocks[index].linear(one.linear.name)) for one in own
            )
    # Tensors on the meta device give the shapes after the cut without allocating memory.
    empty = {
        key: {name: torch.empty(shape, device="meta") for name, shape in own.items()}
        for key, own in adapters.whole.items()
    }
    cut = cut_trained(empty, plan, structure)
    whole = {
        key: {name: tuple(value.shape) for name, value in own.items()} for key, own in cut.items()
    }
    return replace(adapters, blocks=blocks, whole=whole)


def cut_trained(
    tensors: Tensors, plan: ModelPlan, structure: Structure
) -> dict[str, dict[str, Tensor]]:
    """Return the trained tensors of a pruned model.

    Parameters
    ----------
    tensors : by blob key and canonical name
    plan : plan of the model with which they were trained
    structure : structure to keep of it
    """
    return {
        key: {name: _cut(value, name, old, plan, structure) for name, value in tensors[old].items()}
        for old, key in _keys(structure, tensors)
    }


def _keys(structure: Structure, keys: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return pairs of old and new keys of the remaining blobs."""
    places = {
        block_key(block.source): block_key(index) for index, block in enumerate(structure.blocks)
    }
    return [
        (old, places.get(old, old)) for old in keys if old in places or block_of_key(old) is None
    ]


def _cut(value: Tensor, name: str, key: str, plan: ModelPlan, structure: Structure) -> Tensor:
    """Return the kept part of one tensor of the blob ``key``."""
    linear, _, kind = name.rpartition(".")
    block = _block(structure, key)
    # Norms, and tensors outside the blocks, keep their shape.
    if block is None or linear not in ROWS or kind not in SIDES:
        return value
    for side, kinds in enumerate(SIDES[kind]):
        kept = kept_indices(plan, structure, block, linear, kinds) if kinds is not None else None
        if kept is not None:
            value = value.index_select(side, torch.tensor(kept, device=value.device))
    return value


def _block(structure: Structure, key: str) -> BlockStructure | None:
    source = block_of_key(key)
    return next((block for block in structure.blocks if block.source == source), None)
