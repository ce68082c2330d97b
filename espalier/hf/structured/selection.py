"""Structured cuts: choice of the groups to remove, trained tensors and models without them.

A LoRA update is ``scaling * B A``. If columns of the matrix are removed, the same columns of A are
removed. If rows are removed, the same rows of B are removed. The update of the smaller adapter is
therefore a slice of the update of the larger one, and no value changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.cuts import biases_of, cut_of, scales_of
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.models.adapters import Adapter, AdapterPlan, Tensors
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, block_key, block_of_key
from espalier.models.structure import (
    COLUMNS,
    GROUP_KINDS,
    READERS,
    ROWS,
    BlockStructure,
    Structure,
    group_size,
    kept_indices,
    structured_plan,
)
from espalier.settings.pruning import CutSettings
from pruning_kernels.groups.groups import lowest_groups, searched


def in_sequence(groups: Groups, scores: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """Return scores by block and kind as one sequence: (groups,), float64, on the CPU.

    Blocks without scores have zeros.
    """
    flat = torch.zeros(len(groups.costs), dtype=torch.float64)
    for index, block_scores in scores.items():
        for kind in GROUP_KINDS:
            flat[groups.at(index, kind)] = block_scores[kind].to("cpu", torch.float64)
    return flat


def lowest(
    groups: Groups, scores: Tensor, job: CutSettings, ratio: float, gone: Cut | None = None
) -> Cut:
    """Choose the groups with the lowest scores for removal.

    Raises InputError if a score is NaN, for example because a weight of the model is NaN.

    Parameters
    ----------
    scores : (groups,), float64, on the CPU; those of blocks that lose no groups are not used
    ratio : minimum fraction of the cost of the groups that may be removed, exceeded by less than
        one group in each competition; see ``Groups.reachable``
    gone : groups that were removed before. They stay removed regardless of their scores, and count
        towards ``ratio``, so that a growing ratio removes growing sets (FedSpine section 4.2)
    """
    if torch.isnan(scores).any():
        raise InputError(
            "the importance of some prunable groups is not a number; look for weights of the model"
            " that are not finite"
        )
    costs = torch.from_numpy(groups.costs)
    pools = torch.from_numpy(groups.pools)
    removable = torch.from_numpy(groups.removable)
    cut = groups.none
    # Groups compete within a block, a kind or the whole model.
    for competing, target in groups.targets(ratio, job.selection):
        span = groups.span(competing)
        chosen = removable[span]
        own = (scores[span][chosen], costs[span][chosen], pools[span][chosen])
        if job.selection == "search":
            # Pools alternate between the two kinds, so their parity is the kind.
            removed = searched(*own, own[2] % 2, target)
        else:
            already_cut = None if gone is None else torch.from_numpy(gone[span])[chosen]
            removed = lowest_groups(*own, target, already_cut)
        cut[span][chosen.numpy()] = removed.numpy()
    for index in groups.blocks:
        channels = groups.at(index, "channels")
        # A copy, because ``importance`` is changed below.
        importance = scores[channels].numpy().copy()
        if gone is not None:
            # Channels that were removed earlier must not come back to fill a multiple.
            importance[gone[channels]] = -np.inf
        _keep_a_multiple(cut[channels], importance, job.channel_multiple)
    return cut


def _keep_a_multiple(cut: NDArray[np.bool_], scores: NDArray, multiple: int) -> None:
    """Change the removed channels in place so that a multiple of ``multiple`` stays.

    The lowest of the remaining channels are removed. If too few remain, the highest removed ones
    come back.
    """
    num_kept = len(cut) - int(cut.sum())
    # At least one multiple stays, or all channels if there are fewer.
    remaining = max(num_kept // multiple * multiple, min(multiple, len(cut)))
    order = np.argsort(scores, kind="stable")
    if remaining < num_kept:
        # Remove the lowest that stay.
        cut[order[~cut[order]][: num_kept - remaining]] = True
    elif remaining > num_kept:
        # Bring back the highest that were removed.
        cut[order[cut[order]][num_kept - remaining :]] = False


SIDES = {
    "lora_a": (None, COLUMNS), "lora_b": (ROWS, None), "weight": (ROWS, COLUMNS), "bias": (ROWS,),
}  # fmt: skip
"""Kind of prunable group of each dimension of a matrix's tensor, by the suffix of its name."""


def cut_adapter_plan(adapters: AdapterPlan, plan: ModelPlan, structure: Structure) -> AdapterPlan:
    """Return the adapters of a pruned model: blocks are renumbered, ranks and scalings stay."""
    smaller = structured_plan(plan, structure)
    blocks = dict[int, tuple[Adapter, ...]]()
    for index, block in enumerate(structure.blocks):
        if block_adapters := adapters.blocks.get(block.source):
            blocks[index] = tuple(
                replace(adapter, linear=smaller.blocks[index].linear(adapter.linear.name))
                for adapter in block_adapters
            )
    # Tensors on the meta device give the shapes after the cut without allocating memory.
    empty = {
        key: {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        for key, shapes in adapters.whole.items()
    }
    cut = cut_trained(empty, plan, structure)
    cut_shapes = {
        key: {name: tuple(value.shape) for name, value in tensors.items()}
        for key, tensors in cut.items()
    }
    return replace(adapters, blocks=blocks, whole=cut_shapes)


def cut_trained(
    tensors: Tensors, plan: ModelPlan, structure: Structure
) -> dict[str, dict[str, Tensor]]:
    """Return the trained tensors of a pruned model, by blob key and canonical name.

    ``plan`` is that of the model with which ``tensors`` were trained, and ``structure`` what is
    kept of it. Tensors outside the blocks keep their shape.
    """
    blocks_by_source = {
        block.source: (index, block) for index, block in enumerate(structure.blocks)
    }
    trained: dict[str, dict[str, Tensor]] = {}
    for key, block_tensors in tensors.items():
        source = block_of_key(key)
        if source is None:
            trained[key] = dict(block_tensors)
        elif source in blocks_by_source:
            index, block = blocks_by_source[source]
            trained[block_key(index)] = {
                name: _cut(value, name, plan, structure, block)
                for name, value in block_tensors.items()
            }
    return trained


def _cut(
    value: Tensor, name: str, plan: ModelPlan, structure: Structure, block: BlockStructure
) -> Tensor:
    """Return the kept part of one tensor of a block; norms keep their shape."""
    linear, _, kind = name.rpartition(".")
    # Tensors of a matrix have sides; norms are not cut.
    for side, kinds in enumerate(SIDES.get(kind, ()) if linear in ROWS else ()):
        kept = kept_indices(plan, structure, block, linear, kinds) if kinds is not None else None
        if kept is not None:
            value = value.index_select(side, torch.tensor(kept, device=value.device))
    return value


def open_cut(
    model: OpenedModel, blob_of: Callable[[int], bytes], biases: Sequence[str]
) -> OpenedModel:
    """Open the pruned model that the blobs of ``espalier.messages.blobs.cuts`` describe.

    Scales of groups are applied to the columns of the matrices that read them. The matrices
    ``biases`` get a bias, which is rounded to the dtype of their weights.
    """
    groups = Groups.of(model.plan)
    # Each blob is decoded once.
    tensors = {block.index: unpack_tensors(blob_of(block.index)) for block in model.plan.blocks}
    structure = groups.structure(cut_of(groups, tensors.__getitem__), biases)
    new_biases: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for block, kept in zip(
        structured_plan(model.plan, structure).blocks, structure.blocks, strict=True
    ):
        # Blocks of the base have blobs.
        block_tensors = tensors[kept.source]
        values = biases_of(block_tensors, biases)
        for kind, group_scales in scales_of(block_tensors).items():
            size = group_size(model.plan, READERS[kind], kind)
            # One factor per column of the matrix that reads the groups.
            columns = torch.from_numpy(group_scales[list(kept.kept(kind))]).repeat_interleave(size)
            # Columns with scales of 1 are read unchanged.
            if not (columns == 1).all():
                scales[block.linear(READERS[kind]).parameter] = columns
        for linear in block.linears:
            if linear.name in values:
                bias = torch.from_numpy(values[linear.name].copy()).to(TORCH_DTYPES[linear.dtype])
                new_biases[linear.bias_parameter] = bias
    return OpenedModel(model.directory, structure, new_biases, scales)
