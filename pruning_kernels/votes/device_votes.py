"""Votes for one matrix on a CUDA device.

``vote_planes_cuda`` counts them and ``lowest_scores_on_device`` selects the weights. The results
have the bits of ``votes``. All but the counting is plain torch. The counting also has a plain form
for tensors on the CPU, which is not used on other devices.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    group_size,
    pruned_per_group,
)
from pruning_kernels.selection.lowest_scores_on_device import prune_lowest
from pruning_kernels.votes.bitmask import Words
from pruning_kernels.votes.bitmask_on_device import pack_on_device
from pruning_kernels.votes.votes import Sizes, VoteCounter, count_one_by_one


class DeviceVotes(VoteCounter):
    """Votes as bit planes in int64 words on a device."""

    planes: Any

    def __init__(self, shape: tuple[int, int], num_voters: int, device: torch.device) -> None:
        self._device = device
        super().__init__(shape, num_voters)

    def _make_planes(self, planes: int, words: int) -> None:
        self.planes = torch.zeros((planes, words), dtype=torch.int64, device=self._device)

    def _count(self, masks: NDArray[np.uint64], first: int) -> None:
        # The rows of a stack of masks are padded; a transfer needs contiguous memory.
        words = torch.from_numpy(np.ascontiguousarray(masks).view(np.int64)).to(self._device)
        stretch = self.planes[:, first : first + masks.shape[1]]
        if stretch.device.type == "cpu":
            count_one_by_one(words, stretch)
        else:
            from pruning_kernels.votes.vote_planes_cuda import count_votes

            count_votes(words, stretch)

    def _set_plane(self, bit: int, words: Words) -> None:
        self.planes[bit] = torch.from_numpy(words.view(np.int64))

    def counts(self) -> NDArray[np.int32]:
        """Return the votes per weight, shaped like the matrix."""
        return self._counts().cpu().numpy()

    def _on_host(self, words: Any) -> Words:
        return words.cpu().numpy().view(np.uint64)

    def most_voted(
        self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
    ) -> Words:
        """Return the packed mask of the most voted weights of each comparison group."""
        rows, columns = self.shape
        quota = pruned_per_group(self.shape, sparsity, group)
        keys, bits = self._keys(sizes)
        # In a column group a line of the selection is a column of the matrix.
        lines = (keys.T if group == "column" else keys).reshape(-1, group_size(self.shape, group))
        prune_mask = prune_lowest(lines, quota, bits)
        return pack_on_device(
            prune_mask.reshape(columns, rows).T if group == "column" else prune_mask
        )

    def _counts(self) -> Tensor:
        """Return the votes per weight, shaped like the matrix, int32."""
        # Counts of padding words are dropped at the end.
        counts = torch.zeros(self.planes.shape[1] * 64, dtype=torch.int32, device=self._device)
        places = torch.arange(8, dtype=torch.uint8, device=self._device)
        for bit, plane in enumerate(self.planes):
            # Shape (bytes, 8).
            bits = plane.view(torch.uint8)[:, None] >> places & 1
            counts.add_(bits.reshape(-1), alpha=1 << bit)
        return counts[: self.num_weights].reshape(self.shape)

    def _keys(self, sizes: Sizes | None) -> tuple[Tensor, int]:
        """Return keys, (rows, columns), of which the lowest are pruned, and their number of bits.

        A key consists of the missing votes, followed by the size without its upper bit. Keys are
        int32 if they fit, as with the sizes of 16-bit weights and fewer than 65,536 voters.
        """
        # The lowest keys are pruned, so most votes must mean the lowest key.
        missed = self._counts().neg_().add_(self.num_voters)
        bits = self.num_voters.bit_length()
        if sizes is None:
            return missed, bits
        # The upper bit is the sign of the float and does not count.
        size_bits = 8 * sizes.itemsize - 1
        signed = torch.from_numpy(sizes.view(f"i{sizes.itemsize}")).to(self._device)
        # int32 halves the memory and the time of the selection.
        dtype = torch.int32 if bits + size_bits < 32 else torch.int64
        keys = missed.to(dtype).bitwise_left_shift_(size_bits)
        keys.bitwise_or_(signed.to(dtype).bitwise_and_((1 << size_bits) - 1))
        return keys, bits + size_bits
