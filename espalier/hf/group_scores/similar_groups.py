"""Similarity group pruning (FedSODA, section 4.2 and algorithm 1): which blocks of an emulator go.

The output of a block is compared with that of the n-th block behind it, by the angle between the hidden states of a text's last
token. Where the two are alike, the blocks between do little: of each chosen group of n + 1 blocks the first stays. Of the
paper's index range the last start is left out, whose group would reach into the adapter.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.progress.beats import beats
from pruning_kernels.selection.subset_sums import cheapest_groups


@dataclass(frozen=True)
class Group:
    """A pruned group of blocks, of which the first stays: the index map of section 4.3."""

    full: int
    """Number of its first block in the full model (t_i)."""
    smaller: int
    """Number of that block in the sub-model (s_i)."""


@torch.no_grad()
def angular_distances(
    stream: BlockStream, windows: Tensor, apart: int, emulator: range
) -> list[float]:
    """How far the outputs of blocks are from those of the blocks ``apart`` behind them, with both in the emulator.

    One block is in memory at a time, and of the hidden states those of the last tokens.

    Parameters
    ----------
    windows : (windows, tokens), int64: all tokens are real ones, so the last is at the end
    apart : n, 0 or more
    emulator : its blocks

    Returns
    -------
    By the first block's place in the emulator: the mean over windows of arccos(cosine) / pi (equation 5), 0 to 1
    """
    activations = stream.start(windows)
    outputs = deque[Tensor]()
    found = list[float]()
    for index in beats(range(emulator.stop), "comparing block"):
        with stream.block(index, following=index + 1) as block:
            activations.through(index, block)
        if index in emulator:
            outputs.append(latest := _last_tokens(activations))
            if len(outputs) > apart:
                found.append(_mean_angle(outputs.popleft(), latest))
    return found


def _last_tokens(activations: Activations) -> Tensor:
    return torch.cat([batch[:, -1].to("cpu", torch.float32) for batch in activations.batches()])


def _mean_angle(one: Tensor, other: Tensor) -> float:
    """Mean of the angles between rows, as a share of half a turn."""
    cosines = torch.cosine_similarity(one.double(), other.double(), dim=1).clamp(-1, 1)
    return float((cosines.arccos() / math.pi).mean())


def similar_groups(distances: Sequence[float], apart: int, number: int, first: int) -> list[int]:
    """First blocks, in the full model, of the groups that go: those that do not overlap and have the smallest sum of distances.

    ``first`` is the emulator's first block.

    Raises
    ------
    ValueError
        The emulator is too short for so many groups.
    """
    return [first + place for place in cheapest_groups(distances, apart + 1, number)]


def dropped_of_groups(starts: Sequence[int], apart: int) -> list[int]:
    """The blocks that go: of each group all but the first."""
    return [start + behind for start in starts for behind in range(1, apart + 1)]


def evenly_dropped(emulator: range, number: int, rounding: Literal["nearest", "down"]) -> list[int]:
    """Return the blocks of an emulator that go when ``number`` of them are dropped at even distances (FedOT, FedBiOT).

    The blocks that stay are spread from the first to the last, both of which stay if more than one does.

    Parameters
    ----------
    rounding : of the places of blocks that stay: ``nearest`` as in Offsite-Tuning's code, ``down`` as in FedBiOT's
    """
    stay = len(emulator) - number
    kept = set(range(stay))
    if stay > 1 and rounding == "down":
        # In this order, since floating point decides whether 15 becomes 14.
        stride = (len(emulator) - 1) / (stay - 1)
        kept = {int(place * stride) for place in range(stay)}
    elif stay > 1:
        kept = {round(place * (len(emulator) - 1) / (stay - 1)) for place in range(stay)}
    return [index for place, index in enumerate(emulator) if place not in kept]


def index_map(starts: Sequence[int], dropped: Sequence[int]) -> list[Group]:
    """Where the groups' first blocks are in the sub-model: s_i = t_i less the blocks that went before it."""
    return [Group(start, start - sum(gone < start for gone in dropped)) for start in starts]
