"""Sums of squared inputs of several parties, and the masks that follow from them.

Wanda and RIA need nothing else of the text, and the weights are known to all. So a party that has
only the sum decides as one that has all texts.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import (
    Activations,
    BlockStream,
    apply_prune_masks,
    not_finite,
)
from espalier.hf.stream.calibration import observed_pass
from espalier.hf.stream.input_statistics import InputSquareSums
from espalier.messages.tensor_blobs import pack_tensors, views
from espalier.methods.pruning.pooled_pruning import (
    COUNT,
    PooledPruningSettings,
    shared_inputs,
    squares_name,
)
from espalier.models.plan import BlockPlan
from espalier.progress import report_each
from pruning_kernels.fixed_point import from_words, to_words
from pruning_kernels.selection.local_pruning import LocalPruning

Sums = Mapping[str, Tensor]
"""Sum of squares of each distinct input, (channels,), float64, by its first matrix."""


def distinct(block: BlockPlan, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of each distinct input of a block by its first matrix, float64, on the CPU.

    Raises RuntimeError if matrices that should share an input have different ones.
    """
    sums: dict[str, Tensor] = {}
    for name, first in shared_inputs(block).items():
        squares = found[name].cpu()
        # NaN is reported later, in words that name the remedy.
        if not torch.allclose(
            sums.setdefault(first, squares), squares, rtol=0, atol=0, equal_nan=True
        ):
            raise RuntimeError(f"block {block.index}: {name} has another input than {first}")
    return sums


@torch.no_grad()
def dense_sums(stream: BlockStream, samples: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield a party's sums, block by block, in the dense model.

    ``samples`` are (num_samples, sequence_length), int64.
    """
    activations = stream.start(samples)
    for block in report_each(stream.model.plan.blocks, "watching block"):
        with stream.block(block.index, following=block.index + 1) as loaded:
            sums = _sums_of_pass(stream, activations, block, loaded, keep=True)
        yield sums


@torch.no_grad()
def sums_in_block(stream: BlockStream, activations: Activations, index: int) -> dict[str, Tensor]:
    """Return a party's sums in one dense block; the activations stand before it, and stay there."""
    with stream.block(index) as loaded:
        return _sums_of_pass(
            stream, activations, stream.model.plan.blocks[index], loaded, keep=False
        )


def _sums_of_pass(
    stream: BlockStream,
    activations: Activations,
    block: BlockPlan,
    loaded: nn.Module,
    *,
    keep: bool,
) -> dict[str, Tensor]:
    # In float64 the squares of float32 inputs are exact.
    observer = InputSquareSums(stream.linears(block.index, loaded), squares_in=torch.float64)
    return distinct(block, observed_pass(activations, block.index, loaded, observer, keep=keep))


def counted(sums: Sums, tokens: int, job: PooledPruningSettings) -> tuple[dict[str, Tensor], int]:
    """Return the numbers with which a party counts, and its count."""
    if job.weighting == "tokens":
        # Sums count by tokens, or every party once with its mean.
        return dict(sums), tokens
    return {name: values / tokens for name, values in sums.items()}, 1


def pack_sums(
    stream: BlockStream, index: int, sums: Sums, tokens: int, job: PooledPruningSettings
) -> bytes:
    """Serialise a party's sums of a block in fixed point, with its count.

    Raises InputError if a number is not finite or out of range.
    """
    numbers, count = counted(sums, tokens, job)
    # Out of range or NaN would be refused by the server.
    if not all(bool(torch.isfinite(values).all()) for values in numbers.values()):
        raise not_finite(stream, f"block {index} meets")
    try:
        words = {
            squares_name(name): to_words(values, job.fraction_bits)
            for name, values in numbers.items()
        }
    except OverflowError as error:
        raise InputError(
            f"block {index}: the squared inputs of a channel are too large to be summed: {error};"
            " use fewer samples, set pooled-pruning.weighting to 'equal', or check the model"
        ) from None
    return pack_tensors({**words, COUNT: np.array([count], np.uint64)})


def unpack_sums(block: BlockPlan, blob: bytes, job: PooledPruningSettings) -> dict[str, Tensor]:
    """Return the sums of a block, of one party or of several, from a blob."""
    words = views(blob)
    return {
        name: from_words(words[squares_name(name)], job.fraction_bits)
        for name in sorted(set(shared_inputs(block).values()))
    }


def masks_by_sums(
    model: OpenedModel,
    block: BlockPlan,
    sums: Sums,
    job: PooledPruningSettings,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the prune masks of a block, bool, by canonical linear name.

    Scores have the weights of the model's files. Raises NotFiniteError if a weight is NaN or
    infinite.
    """
    pruning = LocalPruning(job.metric, job.sparsity, job.local_group)
    first = shared_inputs(block)
    return {
        # Every matrix has the sums of its input.
        linear.name: pruning.prune_mask(
            model.checkpoint.read(linear.parameter).to(device), sums[first[linear.name]].to(device)
        )
        for linear in block.linears
    }


def pooled(parties: Sequence[tuple[Sums, int]], job: PooledPruningSettings) -> dict[str, Tensor]:
    """Add the sums of several clients, with their numbers of tokens, in float64."""
    numbers = [counted(sums, tokens, job)[0] for sums, tokens in parties]
    return {
        name: sum(party_sums[name] for party_sums in numbers[1:]) + numbers[0][name]
        for name in numbers[0]
    }


@torch.no_grad()
def pooled_masks(
    stream: BlockStream, parties: Sequence[Tensor], job: PooledPruningSettings
) -> Iterator[dict[str, Tensor]]:
    """Yield each block's masks by the pooled samples of several parties.

    ``parties`` are samples, (num_samples, sequence_length), int64. Each party's samples are in
    batches of their own, as at its site. Like the strategies of a run, this is one pass through the
    dense model, or through blocks of which all earlier ones are pruned.
    """
    # One-shot pruning measures all blocks in the dense model.
    one_pass = job.strategy == "one-shot"
    walks = [stream.start(samples) for samples in parties]
    for block in report_each(stream.model.plan.blocks, "pruning block"):
        with stream.block(block.index, following=block.index + 1) as loaded:
            sums = [
                (
                    _sums_of_pass(stream, activations, block, loaded, keep=one_pass),
                    activations.num_tokens,
                )
                for activations in walks
            ]
            masks = masks_by_sums(
                stream.model, block, pooled(sums, job), job, stream.computing.device
            )
            # Iterative pruning goes on behind the pruned block.
            if not one_pass:
                apply_prune_masks(stream.linears(block.index, loaded), masks)
                for activations in walks:
                    activations.through(block.index, loaded)
        yield masks
