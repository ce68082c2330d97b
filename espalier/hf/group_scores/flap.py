"""FLAP (An et al. 2024): structured pruning by the fluctuation of inputs, with bias compensation.

The inputs of two matrices of each block are observed in the dense model: the output projection of
attention, and ``down``. A channel that hardly fluctuates can be replaced by its mean, which becomes
a bias (section 3.4).
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import observed_pass
from espalier.hf.stream.input_statistics import InputObserver
from espalier.hf.structured.selection import in_sequence, lowest
from espalier.messages.blobs.cuts import pack_cut
from espalier.messages.tensor_blobs import pack_tensors, views
from espalier.methods.pruning.flap import FRACTION_BITS, FlapSettings, sums_name
from espalier.methods.pruning.pooled_pruning import COUNT, squares_name
from espalier.models.groups import Cut, Groups
from espalier.models.plan import BlockPlan
from espalier.models.structure import ADDED_BIASES, COLUMNS, group_size
from espalier.progress import report_each
from pruning_kernels.fixed_point import Words, from_words, to_words
from pruning_kernels.groups.fluctuation import (
    Moments,
    channel_scores,
    moments_of,
    pooled,
    standardised,
)

ROWS_AT_ONCE = 256
"""Number of rows of a matrix that are multiplied in float64 at a time."""

BlockMoments = Mapping[str, Moments]
"""Moments by canonical linear name."""


class InputMoments(InputObserver[Moments]):
    """Mean and squared deviations of the input of each linear."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        super().__init__(linears)
        self._moments: dict[str, Moments] = {}

    def _see(self, name: str, inputs: Tensor) -> None:
        moments = moments_of(inputs.flatten(0, -2))
        self._moments[name] = (
            pooled([self._moments[name], moments]) if name in self._moments else moments
        )

    def found(self) -> dict[str, Moments]:
        """Return the moments by canonical linear name."""
        return self._moments


@torch.no_grad()
def watched_moments(stream: BlockStream, samples: Tensor) -> Iterator[BlockMoments]:
    """Yield the moments of one client's inputs, block by block, in the dense model.

    ``samples`` are (num_samples, sequence_length), int64.
    """
    activations = stream.start(samples)
    for block_plan in report_each(stream.model.plan.blocks, "watching block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block:
            linears = stream.linears(index, block)
            observer = InputMoments({name: linears[name] for name in ADDED_BIASES})
            moments = observed_pass(activations, index, block, observer, keep=True)
        yield moments


def pack_moments(moments: BlockMoments) -> bytes:
    """Serialise the sums and sums of squares of a block's inputs in fixed point, and their number.

    Raises InputError if a number is not finite or out of range.
    """
    (tokens,) = {entry.count for entry in moments.values()}
    words = {}
    try:
        for name, entry in moments.items():
            words[sums_name(name)] = to_words(entry.total, FRACTION_BITS)
            words[squares_name(name)] = to_words(entry.square_sum, FRACTION_BITS)
    except OverflowError as error:
        raise InputError(
            f"the inputs of a channel cannot be summed: {error}; use fewer samples, or check"
            " whether the model is damaged"
        ) from None
    return pack_tensors({**words, COUNT: np.array([tokens], np.uint64)})


def unpack_moments(blob: bytes) -> dict[str, Moments]:
    """Return the moments of a block from a blob of ``pack_moments``."""
    words = views(blob)
    return moments_of_sums(int(words[COUNT][0]), words.__getitem__)


def moments_of_sums(tokens: int, words: Callable[[str], Words]) -> dict[str, Moments]:
    """Return the moments of a block from sums over this number of tokens.

    ``words`` returns the sums of a tensor, of one party or of several, in fixed point.
    """
    return {
        name: Moments.of_sums(
            tokens,
            from_words(words(sums_name(name)), FRACTION_BITS),
            from_words(words(squares_name(name)), FRACTION_BITS),
        )
        for name in ADDED_BIASES
    }


def flap_cuts(
    model: OpenedModel, moments: Callable[[int], BlockMoments], job: FlapSettings
) -> Iterator[bytes]:
    """Choose the prunable groups to remove and yield the blob (``blobs.cuts``) of each block.

    ``moments`` is a function from a block index to the moments of its inputs. It is called twice
    per block if biases are compensated.
    """
    groups = Groups.of(model.plan)
    scores = {
        block.index: _block_scores(model, block, moments(block.index), job)
        for block in model.plan.blocks
    }
    cut = lowest(groups, in_sequence(groups, scores), job, groups.reachable(job))
    for block in model.plan.blocks:
        # Requested again, so that the moments of one block are in memory at a time.
        block_moments = moments(block.index) if job.bias_compensation else {}
        biases = {
            name: _bias(
                model, block, name, cut[groups.at(block.index, COLUMNS[name])], block_moments[name]
            )
            for name in block_moments
        }
        yield pack_cut(groups, cut, block.index, biases)


def _block_scores(
    model: OpenedModel, block: BlockPlan, moments: BlockMoments, job: FlapSettings
) -> dict[str, Tensor]:
    """Return the scores of a block's prunable groups, by kind (section 3.3).

    Scores are standardised within the block, so that they can be compared between blocks.
    """
    scores = {}
    for name in ADDED_BIASES:
        channels = channel_scores(
            moments[name], model.checkpoint.read(block.linear(name).parameter)
        )
        # As in the published code; the paper does not mention it.
        if name == "attn.o":
            channels = channels.square()
        size = group_size(model.plan, name, COLUMNS[name])
        # The score of a group is the mean over its channels.
        scores[COLUMNS[name]] = standardised(channels).view(-1, size).mean(dim=1)
    return scores


def _bias(
    model: OpenedModel, block: BlockPlan, name: str, cut: Cut, moments: Moments
) -> NDArray[np.float32]:
    """Return the bias of a matrix after pruning.

    It is the sum of its own bias and the mean contribution of the removed groups. ``cut`` is that
    of the block's groups whose output the matrix reads.
    """
    linear = block.linear(name)
    size = group_size(model.plan, name, COLUMNS[name])
    columns = torch.from_numpy(cut.repeat(size))
    weight = model.checkpoint.read(linear.parameter)[:, columns]
    mean = moments.mean[columns]
    products = [(rows.to(torch.float64) * mean).sum(dim=1) for rows in weight.split(ROWS_AT_ONCE)]
    bias: Tensor | float = 0.0
    if linear.bias:
        bias = model.checkpoint.read(linear.bias_parameter).to(torch.float64)
    return (bias + torch.cat(products)).to(torch.float32).numpy()
