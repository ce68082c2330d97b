"""Structured cuts: choice of the groups to remove, and their removal from trained tensors.

A LoRA update is ``scaling * B A``. If columns of the matrix are removed, the same columns of A are
removed. If rows are removed, the same rows of B are removed. The update of the smaller adapter is
therefore a slice of the update of the larger one, and no value changes.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InputError
from espalier.models.adapters import Adapter, AdapterPlan, Tensors
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, block_key, block_of_key
from espalier.models.structure import (
    COLUMNS,
    GROUP_KINDS,
    ROWS,
    BlockStructure,
    Structure,
    kept_indices,
    structured_plan,
)
from espalier.settings.pruning import CutSettings
from pruning_kernels.groups.groups import lowest_groups, searched


def in_sequence(groups: Groups, scores: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """Return scores by block and kind as one sequence.

    The result is (groups,), float64, on the CPU, with zeros for blocks without scores.
    """
    flat = torch.zeros(len(groups.costs), dtype=torch.float64)
    for index, own in scores.items():
        for kind in GROUP_KINDS:
            flat[groups.at(index, kind)] = own[kind].to("cpu", torch.float64)
    return flat


def lowest(
    groups: Groups, scores: Tensor, job: CutSettings, share: float, gone: Cut | None = None
) -> Cut:
    """Choose the groups with the lowest scores for removal.

    Parameters
    ----------
    groups : groups of the model
    scores : (groups,), float64, on the CPU; those of blocks that lose no groups are not used
    job : settings of the method
    share : minimum fraction of the cost of the groups that may be removed, exceeded by less than
        one group in each competition; see ``Groups.reachable``
    gone : groups that were removed before. They stay removed regardless of their scores, and count
        towards ``share``, so that a growing share removes growing sets (FedSpine section 4.2)

    Raises
    ------
    InputError
        A score is NaN, for example because a weight of the model is NaN.
    """
    if torch.isnan(scores).any():
        raise InputError(
            "the importance of some prunable groups is not a number; look for weights of the model"
            " that are not finite"
        )
    costs = torch.from_numpy(groups.costs)
    pools = torch.from_numpy(groups.pools)
    cut = groups.none
    for competing, target in groups.targets(share, job.selection):
        own = groups.span(competing)
        if job.selection == "search":
            found = searched(scores[own], costs[own], pools[own], pools[own] % 2, target)
        else:
            before = None if gone is None else torch.from_numpy(gone[own])
            found = lowest_groups(scores[own], costs[own], pools[own], target, before)
        cut[own] = found.numpy()
    for index in groups.blocks:
        channels = groups.at(index, "channels")
        worth = scores[channels].numpy().copy()
        if gone is not None:
            # Channels that were removed earlier must not come back to fill a multiple.
            worth[gone[channels]] = -np.inf
        _keep_a_multiple(cut[channels], worth, job.channel_multiple)
    return cut


def _keep_a_multiple(cut: NDArray[np.bool_], scores: NDArray, multiple: int) -> None:
    """Change the removed channels in place so that a multiple of ``multiple`` stays.

    The lowest of the remaining channels are removed. If too few remain, the highest removed ones
    come back.
    """
    stay = len(cut) - int(cut.sum())
    # At least one multiple stays, or all channels if there are fewer.
    wanted = max(stay // multiple * multiple, min(multiple, len(cut)))
    order = np.argsort(scores, kind="stable")
    if wanted < stay:
        cut[order[~cut[order]][: stay - wanted]] = True
    elif wanted > stay:
        cut[order[cut[order]][stay - wanted :]] = False


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
