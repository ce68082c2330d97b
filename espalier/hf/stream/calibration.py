"""One party prunes a model with its calibration windows, block by block (the procedure of Wanda, Sun et al. 2023, section 3).

Per block: one pass of all windows through the block gathers statistics of its linears' inputs; then all its linears
are pruned; then the windows pass through the pruned block, so that the next block sees what it would see in the pruned
model.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.stream.block_stream import Activations, BlockStream, apply_prune_masks, not_finite
from espalier.hf.stream.edits import Edits, WeightEdit, dense
from espalier.hf.stream.input_statistics import InputSquareSums, Watch, watch_for
from espalier.messages.blobs.pruned_matrices import PrunedMatrix
from espalier.progress.beats import beats
from pruning_kernels.selection.local import InputStatistics, LocalPruning
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.sparsegpt.sparsegpt import Factor

ChoosePruneMask = Callable[[Tensor, Any], Tensor]
"""(weight, what was watched of its input) -> prune mask; see ``pruning_kernels.selection.local``."""


@torch.no_grad()
def prune_by_block(
    stream: BlockStream, windows: Tensor, choose: ChoosePruneMask, watch: Watch = InputSquareSums
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Prune every block for one party; the kept weights stay as they are.

    Parameters
    ----------
    stream : the dense model
    windows : (windows, tokens), int64, the party's calibration windows
    choose : decides the prune mask of one matrix
    watch : what it wants to know of the matrix's inputs

    Yields
    ------
    (block index, prune masks by canonical linear name), bool, shaped like the weights
    """
    activations = stream.start(windows)
    for block_plan in beats(stream.model.plan.blocks, "pruning block"):
        with stream.block(block_plan.index, following=block_plan.index + 1) as block:
            masks = _choose_in_block(stream, activations, block_plan.index, block, choose, watch)
            apply_prune_masks(stream.linears(block_plan.index, block), masks)
            activations.through(block_plan.index, block)
        yield block_plan.index, masks


@dataclass(frozen=True)
class PrunedLayer:
    """One block after one party pruned it and, with SparseGPT, adjusted what it kept."""

    index: int
    matrices: dict[str, PrunedMatrix]
    """By canonical linear name."""
    damping: float
    """The largest damping that a matrix needed; 0 without SparseGPT."""


@torch.no_grad()
def prune_layers(
    stream: BlockStream,
    windows: Tensor,
    pruning: LocalPruning,
    layers: Collection[int],
    edits: Edits = dense,
) -> Iterator[PrunedLayer]:
    """Prune some blocks for one party, in order (FedSpaLLM equation 9); the walk ends after the last of them.

    Parameters
    ----------
    stream : the dense model
    windows : (windows, tokens), int64, the party's calibration windows
    pruning : of one matrix
    layers : indices of the blocks that are pruned; the others are passed as they are
    edits : what makes the dense model the one that is pruned
    """
    activations = stream.start(windows)
    for index in beats(range(max(layers) + 1), "pruning block"):
        with stream.block(index, edits(index), index + 1 if index < max(layers) else None) as block:
            pruned = (
                _prune_block(stream, activations, index, block, pruning, edits(index))
                if index in layers
                else None
            )
            if index < max(layers):
                activations.through(index, block)
        if pruned is not None:
            yield pruned


@torch.no_grad()
def choose_in_dense_block(
    stream: BlockStream,
    activations: Activations,
    index: int,
    choose: ChoosePruneMask,
    watch: Watch = InputSquareSums,
) -> dict[str, Tensor]:
    """Prune masks of one block for one party, whose activations stand before it and stay there."""
    with stream.block(index) as block:
        return _choose_in_block(stream, activations, index, block, choose, watch)


def _choose_in_block(
    stream: BlockStream,
    activations: Activations,
    index: int,
    block: nn.Module,
    choose: ChoosePruneMask,
    watch: Watch,
) -> dict[str, Tensor]:
    linears = stream.linears(index, block)
    with _refusals_explained(stream, index):
        inputs = _watched(activations, index, block, linears, watch)
        return {name: choose(linear.weight, inputs[name]) for name, linear in linears.items()}


def _prune_block(
    stream: BlockStream,
    activations: Activations,
    index: int,
    block: nn.Module,
    pruning: LocalPruning,
    edits: Mapping[str, WeightEdit],
) -> PrunedLayer:
    """Prune a loaded block; it then has the weights that are sent.

    What is pruned are the weights of the model's files; those of the block, in the computing dtype, only pass activations.
    """
    linears = stream.linears(index, block)
    with _refusals_explained(stream, index):
        inputs = _watched(activations, index, block, linears, watch_for(pruning))
    matrices = {}
    for plan in stream.model.plan.blocks[index].linears:
        name = plan.name
        dtype = TORCH_DTYPES[plan.dtype]
        with _refusals_explained(stream, index):
            prune_mask, weight = pruning.prune(
                stream.stored_weight(plan, edits.get(name)), inputs[name]
            )
        linears[name].weight.copy_(weight.to(dtype))
        matrices[name] = PrunedMatrix.of(weight, prune_mask, dtype)
    dampings = [factor.damping for factor in inputs.values() if isinstance(factor, Factor)]
    return PrunedLayer(index, matrices, max(dampings, default=0.0))


@contextmanager
def _refusals_explained(stream: BlockStream, index: int) -> Iterator[None]:
    """Name the block whose inputs or weights are not finite, and float16 where it overflows."""
    try:
        yield
    except NotFiniteError as error:
        raise not_finite(stream, f"block {index} meets") from error


def _watched(
    activations: Activations,
    index: int,
    block: nn.Module,
    linears: dict[str, nn.Linear],
    watch: Watch,
) -> Mapping[str, InputStatistics]:
    """What one pass of all windows tells of the inputs of a block's linears."""
    watched = watch(linears)
    watched.windows = activations.num_windows
    with watched.watching():
        activations.through(index, block, keep=False)
    return watched.found()
