"""Block-by-block pruning of a model by one client (Wanda, Sun et al. 2023, section 3).

For each block, a pass of all calibration samples collects statistics of the inputs of its linears.
Then all its linears are pruned. Then the samples pass through the pruned block, so that the next
block sees the inputs that it gets in the pruned model.
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
from espalier.hf.stream.input_statistics import InputObserver, InputSquareSums, S, Watch, watch_for
from espalier.messages.blobs.mask_tensors import PrunedMatrix
from espalier.progress import report_each
from pruning_kernels.selection.local_pruning import LocalPruning
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.sparsegpt import Factor

ChoosePruneMask = Callable[[Tensor, Any], Tensor]
"""Function (weight, statistics of its input) -> prune mask.

See ``pruning_kernels.selection.local_pruning``.
"""


@torch.no_grad()
def prune_by_block(
    stream: BlockStream, samples: Tensor, choose: ChoosePruneMask, watch: Watch = InputSquareSums
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Prune every block of the dense model for one client; yield block indices and prune masks.

    The masks are bool, by canonical linear name, and have the shape of the weights. The kept
    weights stay unchanged.

    Parameters
    ----------
    samples : (num_samples, sequence_length), int64, the calibration samples of the client
    choose : function that chooses the prune mask of one matrix
    watch : class that collects the input statistics which ``choose`` needs
    """
    activations = stream.start(samples)
    for block_plan in report_each(stream.model.plan.blocks, "pruning block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block:
            # Masks follow from the inputs of the dense block; the next block sees the pruned one.
            masks = _choose_in_block(stream, activations, index, block, choose, watch)
            apply_prune_masks(stream.linears(index, block), masks)
            activations.through(index, block)
        yield index, masks


@dataclass(frozen=True)
class PrunedLayer:
    """Block after one client pruned it and, with SparseGPT, updated the kept weights."""

    index: int
    matrices: dict[str, PrunedMatrix]
    """Pruned matrices by canonical linear name."""
    damping: float
    """Largest damping that a matrix needed; 0 without SparseGPT."""


@torch.no_grad()
def prune_layers(
    stream: BlockStream,
    samples: Tensor,
    pruning: LocalPruning,
    layers: Collection[int],
    edits: Edits = dense,
) -> Iterator[PrunedLayer]:
    """Prune some blocks for one client, in order (FedSpaLLM equation 9).

    The forward pass ends after the last block that is pruned.

    Parameters
    ----------
    samples : (num_samples, sequence_length), int64, the calibration samples of the client
    layers : indices of the blocks to prune; other blocks are only passed
    edits : changes that turn the dense model into the model to prune
    """
    activations = stream.start(samples)
    for index in report_each(range(max(layers) + 1), "pruning block"):
        # Blocks that are not pruned are passed, with the edits of the global model.
        with stream.block(index, edits(index), index + 1 if index < max(layers) else None) as block:
            pruned = (
                _prune_block(stream, activations, index, block, pruning, edits(index))
                if index in layers
                else None
            )
            # No block needs the output of the last one.
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
    """Return the prune masks of one block; the activations stand before it, and stay there."""
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
        inputs = observed_pass(activations, index, block, watch(linears))
        return {name: choose(linear.weight, inputs[name]) for name, linear in linears.items()}


def _prune_block(
    stream: BlockStream,
    activations: Activations,
    index: int,
    block: nn.Module,
    pruning: LocalPruning,
    edits: Mapping[str, WeightEdit],
) -> PrunedLayer:
    """Prune the weights of the files; the loaded block then holds the weights that are sent."""
    linears = stream.linears(index, block)
    matrices = {}
    with _refusals_explained(stream, index):
        inputs = observed_pass(activations, index, block, watch_for(pruning)(linears))
        for plan in stream.model.plan.blocks[index].linears:
            name = plan.name
            dtype = TORCH_DTYPES[plan.dtype]
            # The weights of the files: the loaded block is in the compute dtype.
            stored = stream.model.checkpoint.read(plan.parameter)
            stored = edits[name](stored) if name in edits else stored
            prune_mask, weight = pruning.prune(stored.to(stream.computing.device), inputs[name])
            # The next block sees the output of the weights that are sent, rounded as in the files.
            linears[name].weight.copy_(weight.to(dtype))
            matrices[name] = PrunedMatrix.of(weight, prune_mask, dtype)
    dampings = [factor.damping for factor in inputs.values() if isinstance(factor, Factor)]
    return PrunedLayer(index, matrices, max(dampings, default=0.0))


@contextmanager
def _refusals_explained(stream: BlockStream, index: int) -> Iterator[None]:
    """Turn NotFiniteError into an error that names the block and, if it overflowed, float16."""
    try:
        yield
    except NotFiniteError as error:
        raise not_finite(stream, f"block {index} meets") from error


def observed_pass(
    activations: Activations,
    index: int,
    block: nn.Module,
    observer: InputObserver[S],
    *,
    keep: bool = False,
) -> Mapping[str, S]:
    """Return the input statistics of a block's modules after one pass of all samples.

    With ``keep`` the activations stand behind the loaded block afterwards.
    """
    observer.samples = activations.num_samples
    with observer.watching():
        # Statistics are collected from the inputs; outputs are kept only on request.
        activations.through(index, block, keep=keep)
    return observer.found()
