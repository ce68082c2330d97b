"""Similarity group pruning: choice of the blocks to drop from an emulator.

Source: FedSODA, section 4.2 and algorithm 1. The output of a block is compared with that of the
n-th block after it, by the angle between the hidden states of a text's last token. If both are
similar, the blocks between them have little effect. In each chosen group of n + 1 blocks, the first
block stays. The last start of the paper's index range is omitted, because its group would extend
into the adapter.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.hf.stream.block_stream import BlockStream
from espalier.progress import report_each
from pruning_kernels.groups.groups import cheapest_groups


@dataclass(frozen=True)
class Group:
    """Pruned group of blocks, of which the first stays; entry of the index map of section 4.3."""

    full: int
    """Index of its first block in the full model (t_i)."""
    smaller: int
    """Index of that block in the sub-model (s_i)."""


@torch.no_grad()
def angular_distances(
    stream: BlockStream, samples: Tensor, apart: int, emulator: range
) -> list[float]:
    """Return the angular distances between the outputs of blocks that are ``apart`` blocks apart.

    They are means over samples of arccos(cosine) / pi (equation 5), in [0, 1], by the place of the
    first block in the emulator. Only pairs with both blocks in the emulator are compared. One block
    and the hidden states of the last tokens are in memory at a time. ``samples`` are (num_samples,
    sequence_length), int64, without padding, so that the last token is at the end.
    """
    activations = stream.start(samples)
    outputs = deque[Tensor]()
    distances = list[float]()
    for index in report_each(range(emulator.stop), "comparing block"):
        with stream.block(index, following=index + 1) as block:
            activations.through(index, block)
        if index in emulator:
            last = [batch[:, -1].to("cpu", torch.float32) for batch in activations.batches()]
            outputs.append(latest := torch.cat(last))
            if len(outputs) > apart:
                cosines = torch.cosine_similarity(
                    outputs.popleft().double(), latest.double(), dim=1
                )
                distances.append(float((cosines.clamp(-1, 1).arccos() / math.pi).mean()))
    return distances


def similar_groups(distances: Sequence[float], apart: int, number: int, first: int) -> list[int]:
    """Return the first blocks of the groups to drop, as indices of the full model.

    The groups do not overlap and have the smallest sum of distances. ``first`` is the index of the
    emulator's first block.
    """
    return [first + start for start in cheapest_groups(distances, apart + 1, number)]


def dropped_of_groups(starts: Sequence[int], apart: int) -> list[int]:
    """Return the blocks to drop: all but the first of each group."""
    return [start + offset for start in starts for offset in range(1, apart + 1)]


def evenly_dropped(emulator: range, number: int, rounding: Literal["nearest", "down"]) -> list[int]:
    """Return the ``number`` blocks of an emulator to drop at even distances (FedOT, FedBiOT).

    The remaining blocks are spread from the first to the last block, both of which stay if more
    than one does. Their places are rounded to the ``nearest`` number as in Offsite-Tuning's code,
    or ``down`` as in FedBiOT's.
    """
    num_kept = len(emulator) - number
    last = len(emulator) - 1
    kept = set(range(num_kept))
    if num_kept > 1 and rounding == "down":
        # The order of operations is that of FedBiOT's code: rounding decides whether 15 becomes 14.
        stride = last / (num_kept - 1)
        kept = {int(position * stride) for position in range(num_kept)}
    elif num_kept > 1:
        kept = {round(position * last / (num_kept - 1)) for position in range(num_kept)}
    return [index for position, index in enumerate(emulator) if position not in kept]


def index_map(starts: Sequence[int], dropped: Sequence[int]) -> list[Group]:
    """Return the places of the groups' first blocks in the sub-model.

    s_i is t_i minus the number of dropped blocks before it.
    """
    return [Group(start, start - sum(index < start for index in dropped)) for start in starts]
