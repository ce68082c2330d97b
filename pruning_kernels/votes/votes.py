"""Votes of the clients, and selection of the most voted weights (FedPrLLM steps 3 and 4).

There are three implementations with the same bits: plain NumPy; for large matrices the compiled
kernels of ``carry_save`` and ``most_voted``; and on a CUDA device ``device_votes``.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.compiler import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    group_size,
    pruned_per_group,
)
from pruning_kernels.votes.bitmask import Words, num_words, pack, planes_for, unpack

Sizes = NDArray[np.unsignedinteger]
"""Tie-breakers among equally voted weights: uint16 or uint32, the smaller goes first.

The upper bit is ignored, so that the bits of a float count as its magnitude.
"""


def magnitudes(weight: Tensor) -> Sizes:
    """Return the weights' bits as sizes, same shape; 16- and 32-bit floats are not copied."""
    # float64 and 8-bit floats: only 16- and 32-bit sizes are supported.
    if weight.element_size() not in (2, 4):
        weight = weight.to(torch.float32)
    # A view of the bits, so large weights are not copied.
    integers = (
        weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).numpy()
    )
    return integers.view(np.uint16 if integers.itemsize == 2 else np.uint32)


CPU = torch.device("cpu")
MAX_PLANES = 16
"""Maximum number of planes for which the kernels' vote counts fit their type."""


def count_one_by_one(masks: Any, planes: Any) -> None:
    """Count votes without compiled code: arrays of NumPy, or tensors on the CPU."""
    planes[:] = 0
    for mask in masks:
        carry = mask
        for plane in planes:
            # The right side is evaluated before both assignments.
            plane[:], carry = plane ^ carry, plane & carry


class VoteCounter:
    """Votes for one matrix, as bit planes in CPU memory; inputs and results are NumPy arrays.

    Plane ``p`` has bit ``i`` set if the number of votes for weight ``i`` has bit ``p`` set. Masks
    are added as whole words, without unpacking. The planes need ``log2(voters) + 1`` bits per
    weight, for any number of voters.
    """

    def __init__(self, shape: tuple[int, int], num_voters: int) -> None:
        self.shape = shape
        self.num_voters = num_voters
        self.num_weights = shape[0] * shape[1]
        self._make_planes(max(1, num_voters.bit_length()), num_words(self.num_weights))

    def _make_planes(self, planes: int, words: int) -> None:
        self._room = planes_for(planes, words)
        self.planes = self._room[:, :words]

    def count(self, masks: NDArray[np.uint64], first: int = 0) -> None:
        """Count the votes of all voters in a range of words.

        Parameters
        ----------
        masks : (num_voters, words), packed prune masks, starting at word ``first``; counting is
            fastest in a ``bitmask.stack_of_masks``

        Raises
        ------
        ValueError
            There are more words, or another number of voters.
        """
        voters, words = masks.shape
        if voters != self.num_voters or first + words > self.planes.shape[1]:
            raise ValueError(
                f"expected {self.num_voters} masks of {self.planes.shape[1]} words, got"
                f" {masks.shape} at {first}"
            )
        self._count(masks, first)

    def _count(self, masks: NDArray[np.uint64], first: int) -> None:
        planes = self.planes[:, first : first + masks.shape[1]]
        # The same results; compilation is only worth it for large matrices.
        if self._large:
            from pruning_kernels.votes.carry_save import count_votes

            use_threads_of_torch()
            count_votes(
                masks if masks.strides[1] == masks.itemsize else np.ascontiguousarray(masks), planes
            )
        else:
            count_one_by_one(masks, planes)

    def take_counts(self, counts: NDArray[np.unsignedinteger]) -> None:
        """Set the votes per weight, (num_weights,), from a sum of votes.

        A count above the number of voters, which no honest client causes, is unanimous.
        """
        # A count above the number of voters is impossible and would be a wrong plane.
        votes = np.minimum(counts, self.num_voters)
        for bit in range(len(self.planes)):
            self._set_plane(bit, pack((votes >> votes.dtype.type(bit) & 1).astype(np.bool_)))

    def _set_plane(self, bit: int, words: Words) -> None:
        self.planes[bit] = words

    def trim(self, trim: int) -> None:
        """Leave out the ``trim`` smallest and largest votes of each weight, after counting.

        Votes are 0 or 1, so of v votes of n clients ``min(max(v - trim, 0), n - 2 trim)`` remain,
        of n - 2 trim voters. This is the trimmed mean of ``trimmed_mean``, times the number of
        voters. A weight that only ``trim`` clients or fewer would prune gains nothing by their
        votes, and one that only so many would keep is as if all would prune it.

        Raises
        ------
        ValueError
            ``trim`` is negative or leaves no voter.
        """
        remaining = self.num_voters - 2 * trim
        if trim < 0 or remaining < 1:
            raise ValueError(f"{trim} of {self.num_voters} votes cannot be left out at each end")
        if not trim:
            return
        # Subtract ``trim`` in bit planes; a borrow at the end marks weights with fewer votes.
        # zeros in the planes' type, which may be a tensor on a device.
        borrow = self.planes[0] ^ self.planes[0]
        zeros = borrow
        for bit, plane in enumerate(self.planes):
            # A bit of ``trim`` for all weights at once.
            taken = ~zeros if trim >> bit & 1 else zeros
            less = plane ^ taken ^ borrow
            borrow = (~plane & (taken | borrow)) | (taken & borrow)
            plane[:] = less
        # Fewer votes than ``trim`` remain none.
        for plane in self.planes:
            plane[:] = plane & ~borrow
        # ``equal`` and ``above`` compare with ``remaining``, from the highest plane downward.
        equal = ~zeros
        above = zeros
        for bit in reversed(range(len(self.planes))):
            plane = self.planes[bit]
            if remaining >> bit & 1:
                equal = equal & plane
            else:
                above = above | (equal & plane)
                equal = equal & ~plane
        # Counts above ``remaining`` are set to it.
        for bit, plane in enumerate(self.planes):
            plane[:] = (plane | above) if remaining >> bit & 1 else (plane & ~above)
        self.num_voters = remaining

    def counts(self) -> NDArray[np.int32]:
        """Return the votes per weight, shaped like the matrix (FedPrLLM's summed masks)."""
        counts = np.zeros(self.shape, dtype=np.int32)
        for bit, plane in enumerate(self.planes):
            counts += unpack(plane, self.shape).astype(np.int32) << bit
        return counts

    def unanimous(self) -> Words:
        """Return the packed mask of the weights that every voter would prune."""
        # All ones in the planes' type; then each plane must equal the number of voters.
        all_of_them = ~(self.planes[0] ^ self.planes[0])
        for bit, plane in enumerate(self.planes):
            all_of_them &= plane if self.num_voters >> bit & 1 else ~plane
        words = self._on_host(all_of_them)
        # The unused bits of the last word are zero in every mask.
        if self.num_weights % 64:
            words[-1] &= np.uint64((1 << self.num_weights % 64) - 1)
        return words

    def _on_host(self, words: Any) -> Words:
        """Return words of the planes' device in CPU memory."""
        return words

    def most_voted(
        self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
    ) -> Words:
        """Return the packed mask of the most voted weights of each comparison group.

        See ``select_most_voted``.
        """
        if not self._large or len(self.planes) > MAX_PLANES:
            return pack(select_most_voted(self.counts(), sparsity, group, sizes))
        from pruning_kernels.votes import vote_selection

        use_threads_of_torch()
        quota = pruned_per_group(self.shape, sparsity, group)
        # An empty array means that the index breaks ties.
        flat = np.empty(0, np.uint16) if sizes is None else sizes.reshape(-1)
        if group == "layer":
            # The kernels get whole lines, and the result is cut to the words of the mask.
            words = vote_selection.most_voted_in_layer(self._room, self.num_weights, quota, flat)
        elif group == "row":
            words = vote_selection.most_voted_in_rows(self._room, self.shape, quota, flat)
        elif group == "column":
            words = vote_selection.most_voted_in_columns(self._room, self.shape, quota, flat)
        else:
            words = vote_selection.most_voted_in_pattern(
                self._room, self.shape, group_size(self.shape, group), quota, flat
            )
        return words[: self.planes.shape[1]]

    @property
    def _large(self) -> bool:
        return self.num_weights >= WORTH_COMPILING


def select_most_voted(
    counts: NDArray[np.int32], sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
) -> NDArray[np.bool_]:
    """Prune the weights with most votes in each comparison group.

    This is the top-k of the summed masks in FedPrLLM section 3.2.

    Parameters
    ----------
    counts : (rows, columns), votes per weight, not negative
    sparsity : fraction of each group to prune, in [0, 1)
    group : see ``ComparisonGroup``
    sizes : (rows, columns) or None. Of weights with equally many votes the one with the smaller
        size is pruned first, then the one with the lower index. With None only the index decides.
        The reference code uses a random permutation, which random sizes reproduce with a seed.

    Returns
    -------
    NDArray[np.bool_]
        Prune mask, same shape; each group loses exactly ``pruned_per_group`` weights.
    """
    rows, columns = counts.shape
    quota = pruned_per_group((rows, columns), sparsity, group)
    lines = (-1, group_size((rows, columns), group))
    # Without the sign bit; the bits of a float then order as its magnitude.
    key = None if sizes is None else sizes & sizes.dtype.type(np.iinfo(sizes.dtype).max >> 1)
    if group == "column":
        key = None if key is None else key.T.reshape(lines)
        return np.ascontiguousarray(
            _select_in_lines(counts.T.reshape(lines), quota, key).reshape(columns, rows).T
        )
    key = None if key is None else key.reshape(lines)
    return _select_in_lines(counts.reshape(lines), quota, key).reshape(rows, columns)


def _select_in_lines(counts: NDArray[np.int32], quota: int, key: Sizes | None) -> NDArray[np.bool_]:
    """Prune the ``quota`` weights of each line with the most votes and then the smallest keys."""
    # The sort is stable, so that of equal weights the lower index comes first.
    # The last key of ``lexsort`` is the primary one: votes, then size.
    order = np.lexsort((-counts,) if key is None else (key, -counts), axis=1)
    prune_mask = np.zeros(counts.shape, np.bool_)
    np.put_along_axis(prune_mask, order[:, :quota], True, axis=1)
    return prune_mask
