"""What is trained follows a cut, when units go in mid-run: adapters, and tensors that are trained whole.

A LoRA update is ``scaling * B A``. Without some columns of the matrix A loses the same columns, without some rows B loses the
same rows, so that the smaller adapter is the slice of the larger one's update, and no number of it changes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from espalier.hf.structured.slices import kept_indices
from espalier.models.adapters import Adapter, AdapterPlan, Tensors
from espalier.models.plan import ModelPlan, block_key, block_of_key
from espalier.models.structure import COLUMNS, ROWS, BlockStructure, Structure, structured_plan

SIDES = {
    "lora_a": (None, COLUMNS), "lora_b": (ROWS, None), "weight": (ROWS, COLUMNS), "bias": (ROWS,),
}  # fmt: skip
"""Kind of unit that each side of a tensor of a matrix belongs to, by the end of its name."""


def cut_adapter_plan(adapters: AdapterPlan, plan: ModelPlan, structure: Structure) -> AdapterPlan:
    """The adapters of a smaller model: blocks are numbered anew, ranks and scalings stay."""
    smaller = structured_plan(plan, structure)
    blocks = dict[int, tuple[Adapter, ...]]()
    for index, block in enumerate(structure.blocks):
        if own := adapters.blocks.get(block.source):
            blocks[index] = tuple(
                replace(one, linear=smaller.blocks[index].linear(one.linear.name)) for one in own
            )
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
    """What is trained of a smaller model.

    Parameters
    ----------
    tensors : by blob key and canonical name
    plan : of the model that they were trained with
    structure : what is kept of it
    """
    return {
        key: {name: _cut(value, name, old, plan, structure) for name, value in tensors[old].items()}
        for old, key in _keys(structure, tensors)
    }


def _keys(structure: Structure, keys: Mapping[str, object]) -> list[tuple[str, str]]:
    """Keys of the blobs that are left, and the keys that they have then."""
    places = {
        block_key(block.source): block_key(index) for index, block in enumerate(structure.blocks)
    }
    return [
        (old, places.get(old, old)) for old in keys if old in places or block_of_key(old) is None
    ]


def _cut(value: Tensor, name: str, key: str, plan: ModelPlan, structure: Structure) -> Tensor:
    """What is kept of one tensor of the blob ``key``."""
    linear, _, kind = name.rpartition(".")
    block = _block(structure, key)
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
