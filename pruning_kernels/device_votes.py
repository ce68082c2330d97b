"""Votes for one matrix on a device of torch: counted by ``vote_planes_cuda``, selected by a histogram and a sort of the ties.

The bits are those of ``votes``. Everything but the counting is plain torch, and the counting has a plain form too, for
tensors on the CPU; it is never taken on another device.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.bitmask import Words, num_words
from pruning_kernels.lowest_on_device import prune_lowest
from pruning_kernels.selection import ComparisonGroup, group_size, pruned_per_group


class DeviceVotes:
    """Bit planes as in ``votes.VoteCounter``, int64 words on a device."""

    def __init__(self, shape: tuple[int, int], num_voters: int, device: torch.device) -> None:
        self.shape = shape
        self.num_voters = num_voters
        self.num_weights = shape[0] * shape[1]
        planes = (max(1, num_voters.bit_length()), num_words(self.num_weights))
        self.planes = torch.zeros(planes, dtype=torch.int64, device=device)

    def count(self, masks: NDArray[np.uint64], first: int) -> None:
        """Count the votes of all voters in a stretch of words, (num_voters, words)."""
        on_device = torch.from_numpy(np.ascontiguousarray(masks).view(np.int64)).to(self.planes.device)
        stretch = self.planes[:, first : first + masks.shape[1]]
        if stretch.device.type == "cpu":
            _count_one_by_one(on_device, stretch)
        else:
            from pruning_kernels.vote_planes_cuda import count_votes

            count_votes(on_device, stretch)

    def counts(self) -> NDArray[np.int32]:
        """Votes per weight, shaped like the matrix."""
        return self._counts().cpu().numpy()

    def unanimous(self) -> Words:
        """Packed mask of the weights that every voter would prune."""
        all_of_them = torch.full_like(self.planes[0], -1)
        for bit, plane in enumerate(self.planes):
            all_of_them &= plane if self.num_voters >> bit & 1 else ~plane
        words = all_of_them.cpu().numpy().view(np.uint64)
        if self.num_weights % 64:
            words[-1] &= np.uint64((1 << self.num_weights % 64) - 1)
        return words

    def most_voted(self, sparsity: float, group: ComparisonGroup, sizes: NDArray[np.unsignedinteger] | None) -> Words:
        """Packed mask of the most voted weights of each comparison group; see ``votes.select_most_voted``."""
        rows, columns = self.shape
        lines = (-1, group_size(self.shape, group))
        quota = pruned_per_group(self.shape, sparsity, group)
        missed = self.num_voters - self._counts()  # so that the lowest goes first, of the votes as of the sizes
        tie_keys = None if sizes is None else self._tie_keys(sizes)
        if group == "column":
            missed, tie_keys = missed.T.contiguous(), None if tie_keys is None else tie_keys.T
        tie_keys = None if tie_keys is None else tie_keys.reshape(lines)
        prune_mask = _select_in_lines(missed.reshape(lines), self.num_voters + 1, quota, tie_keys)
        return _packed(prune_mask.reshape(columns, rows).T if group == "column" else prune_mask)

    def _counts(self) -> Tensor:
        """Votes per weight, shaped like the matrix, int32."""
        counts = torch.zeros(self.planes.shape[1] * 64, dtype=torch.int32, device=self.planes.device)
        places = torch.arange(8, dtype=torch.uint8, device=self.planes.device)
        for bit, plane in enumerate(self.planes):
            bits = plane.view(torch.uint8)[:, None] >> places & 1  # (bytes, 8)
            counts.add_(bits.reshape(-1), alpha=1 << bit)
        return counts[: self.num_weights].reshape(self.shape)

    def _tie_keys(self, sizes: NDArray[np.unsignedinteger]) -> Tensor:
        """Sizes without their upper bit, int32, (rows, columns)."""
        signed, low = (np.int16, 0x7FFF) if sizes.itemsize == 2 else (np.int32, 0x7FFFFFFF)
        return torch.from_numpy(sizes.view(signed)).to(self.planes.device).to(torch.int32) & low


def _count_one_by_one(masks: Tensor, planes: Tensor) -> None:
    """What the kernel does, one mask after the other: add it to the lowest plane, and its carry to the next."""
    planes.zero_()
    for mask in masks:
        carry = mask
        for plane in planes:
            both = plane & carry
            plane.bitwise_xor_(carry)
            carry = both


def _select_in_lines(missed: Tensor, levels: int, quota: int, tie_keys: Tensor | None) -> Tensor:
    """Prune the ``quota`` weights of each line with fewest missed votes, below ``levels``; of equal ones the lowest key."""
    lines, size = missed.shape
    if lines * levels > missed.numel():  # short lines: a histogram of each would be longer than they are
        return prune_lowest(missed if tie_keys is None else missed.to(torch.int64) << 32 | tie_keys, quota)
    line_index = torch.arange(lines, device=missed.device)[:, None]
    histogram = torch.bincount((line_index * levels + missed).reshape(-1), minlength=lines * levels)
    up_to = histogram.reshape(lines, levels).cumsum(dim=1)  # weights with that many missed votes or fewer
    threshold = (up_to < quota).sum(dim=1, keepdim=True)  # the lowest level that fills the quota
    prune_mask, tied = missed < threshold, missed == threshold
    missing = quota - prune_mask.sum(dim=1)

    places = torch.nonzero(tied.reshape(-1))[:, 0]  # row-major: by line, then by index
    line = places // size
    if tie_keys is not None:  # sorted within their lines, so that ``line`` stays as it is
        places = places[torch.sort(line << 32 | tie_keys.reshape(-1)[places], stable=True).indices]
    ties = tied.sum(dim=1)
    first_of_line = ties.cumsum(0) - ties
    chosen = torch.arange(len(places), device=missed.device) - first_of_line[line] < missing[line]
    prune_mask.reshape(-1)[places[chosen]] = True
    return prune_mask


def _packed(prune_mask: Tensor) -> Words:
    """``bitmask.pack`` of a tensor on a device: flat words on the host."""
    weights = prune_mask.numel()
    bits = torch.zeros(num_words(weights) * 64, dtype=torch.uint8, device=prune_mask.device)
    bits[:weights] = prune_mask.reshape(-1)
    places = torch.arange(8, dtype=torch.uint8, device=prune_mask.device)
    in_bytes = (bits.reshape(-1, 8) << places).sum(dim=1, dtype=torch.uint8)
    return in_bytes.cpu().numpy().view(np.uint64)
