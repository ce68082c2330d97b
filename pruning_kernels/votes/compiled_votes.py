"""Votes for one large matrix on the CPU, in numba: ``vote_planes`` and ``most_voted``."""

import numpy as np
from numpy.typing import NDArray

from pruning_kernels.compiled import use_threads_of_torch
from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    group_size,
    parse_pattern,
    pruned_per_group,
)
from pruning_kernels.votes import most_voted
from pruning_kernels.votes.bitmask import Words, pack
from pruning_kernels.votes.vote_planes import count_votes, numbers_of
from pruning_kernels.votes.votes import Sizes, VoteCounter

MAX_VOTERS = (1 << 16) - 1
"""Maximum number of voters whose counts fit the kernels' type."""


class CompiledVotes(VoteCounter):
    """Votes as bit planes in uint64 words."""

    planes: NDArray[np.uint64]

    def _make_planes(self, planes: int, words: int) -> None:
        self.planes = np.zeros((planes, words), np.uint64)

    def _count(self, masks: NDArray[np.uint64], first: int) -> None:
        use_threads_of_torch()
        count_votes(masks, self.planes[:, first : first + masks.shape[1]])

    def _set_plane(self, bit: int, words: Words) -> None:
        self.planes[bit] = words

    def _on_host(self, words: Words) -> Words:
        return words

    def counts(self) -> NDArray[np.int32]:
        """Return the votes per weight, shaped like the matrix."""
        return self._numbers().astype(np.int32)

    def _numbers(self) -> NDArray[np.uint16]:
        counts = np.empty(self.num_weights, np.uint16)
        use_threads_of_torch()
        numbers_of(self.planes, counts)
        return counts.reshape(self.shape)

    def most_voted(
        self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
    ) -> Words:
        """Return the packed mask of the most voted weights of each comparison group."""
        threads = use_threads_of_torch()
        quota = pruned_per_group(self.shape, sparsity, group)
        if group == "layer":
            flat = np.empty(0, np.uint16) if sizes is None else sizes.reshape(-1)
            return most_voted.most_voted_in_layer(self.planes, self.num_weights, quota, flat)
        if not quota:
            return np.zeros(self.planes.shape[1], np.uint64)
        by_column = group == "column"
        lines = (-1, group_size(self.shape, group))
        counts, sizes = (
            np.ascontiguousarray(matrix.T if by_column else matrix)
            for matrix in (self._numbers(), np.empty((0, 0), np.uint16) if sizes is None else sizes)
        )
        given = (counts.reshape(lines), sizes.reshape(lines) if sizes.size else sizes, quota)
        if parse_pattern(group) is None:
            found = most_voted.most_voted_in_lines(*given, threads)
        else:
            found = most_voted.most_voted_in_pattern(*given)
        return pack(found.T if by_column else found)
