"""What the clients prune together: count their votes and select the weights with most of them (FedPrLLM steps 3 and 4).

There are three ways to the same bits: plain NumPy; for matrices that are worth the time to compile them, the kernels of
``carry_save``, ``most_voted`` and ``most_voted_columns``; and on a CUDA device ``device_votes``.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.bitmask import Words, num_words, pack, planes_for, unpack
from pruning_kernels.comparison_groups import ComparisonGroup, group_size, pruned_per_group
from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch

Sizes = NDArray[np.unsignedinteger]
"""What decides among equally voted weights, the smaller going first: uint16 or uint32, whose upper bit does not count, so
that the bits of a float are its magnitude."""


def magnitudes(weight: Tensor) -> Sizes:
    """The weights' bits as sizes, same shape; no copy of 16 or 32-bit floats."""
    if weight.element_size() not in (2, 4):
        weight = weight.to(torch.float32)
    integers = (
        weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).numpy()
    )
    return integers.view(np.uint16 if integers.itemsize == 2 else np.uint32)


CPU = torch.device("cpu")
MOST_PLANES = 16
"""With more planes than that, the kernels' votes per weight no longer fit their type."""


class VoteCounter:
    """Votes for one matrix, held as bit planes: plane ``p`` has bit ``i`` set if weight ``i``'s count has ``2**p`` in it.

    Masks are added as whole words, without being unpacked; the planes need ``log2(voters) + 1`` bits per weight, and any
    number of voters fits. What goes in and comes out is NumPy's, wherever the planes are.
    """

    def __init__(self, shape: tuple[int, int], num_voters: int, device: torch.device = CPU) -> None:
        self.shape = shape
        self.num_voters = num_voters
        self._num_words = num_words(shape[0] * shape[1])
        self._votes = votes_on(device, shape, num_voters)

    def count(self, masks: NDArray[np.uint64], first: int = 0) -> None:
        """Count the votes of all voters in a stretch of words.

        Parameters
        ----------
        masks : (num_voters, words), packed prune masks from word ``first`` on; counted fastest in a
            ``bitmask.stack_of_masks``

        Raises
        ------
        ValueError
            There are more words, or another number of voters.
        """
        voters, words = masks.shape
        if voters != self.num_voters or first + words > self._num_words:
            raise ValueError(
                f"expected {self.num_voters} masks of {self._num_words} words, got {masks.shape} at"
                f" {first}"
            )
        self._votes.count(masks, first)

    def counts(self) -> NDArray[np.int32]:
        """Votes per weight, shaped like the matrix: the aggregated mask matrix of FedPrLLM."""
        return self._votes.counts()

    def unanimous(self) -> Words:
        """Packed mask of the weights that every voter would prune."""
        return self._votes.unanimous()

    def most_voted(
        self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
    ) -> Words:
        """Packed mask of the most voted weights of each comparison group; see ``select_most_voted``."""
        return self._votes.most_voted(sparsity, group, sizes)


class Votes(Protocol):
    """What a ``VoteCounter`` asks of the device that holds its planes; its own methods say what each does."""

    def count(self, masks: NDArray[np.uint64], first: int) -> None: ...

    def counts(self) -> NDArray[np.int32]: ...

    def unanimous(self) -> Words: ...

    def most_voted(self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None) -> Words: ...


def votes_on(device: torch.device, shape: tuple[int, int], num_voters: int) -> Votes:
    """Bit planes without votes, on a device."""
    if device.type == "cpu":
        return HostVotes(shape, num_voters)
    from pruning_kernels.device_votes import DeviceVotes

    return DeviceVotes(shape, num_voters, device)


class HostVotes:
    """Bit planes in the memory of the CPU, (number of planes, words) uint64."""

    def __init__(self, shape: tuple[int, int], num_voters: int) -> None:
        self.shape = shape
        self.num_voters = num_voters
        self.num_weights = shape[0] * shape[1]
        self._room = planes_for(max(1, num_voters.bit_length()), num_words(self.num_weights))
        self.planes = self._room[:, : num_words(self.num_weights)]

    def count(self, masks: NDArray[np.uint64], first: int) -> None:
        """Count the votes of all voters in a stretch of words."""
        planes = self.planes[:, first : first + masks.shape[1]]
        if self._large:
            from pruning_kernels.carry_save import count_votes

            use_threads_of_torch()
            count_votes(
                masks if masks.strides[1] == masks.itemsize else np.ascontiguousarray(masks), planes
            )
        else:
            planes[:] = 0
            for mask in masks:
                carry = mask
                for plane in planes:
                    plane[:], carry = plane ^ carry, plane & carry

    def counts(self) -> NDArray[np.int32]:
        """Votes per weight, shaped like the matrix."""
        counts = np.zeros(self.shape, dtype=np.int32)
        for bit, plane in enumerate(self.planes):
            counts += unpack(plane, self.shape).astype(np.int32) << bit
        return counts

    def unanimous(self) -> Words:
        """Packed mask of the weights that every voter would prune."""
        all_of_them = np.full(self.planes.shape[1], np.uint64(0xFFFFFFFFFFFFFFFF))
        for bit, plane in enumerate(self.planes):
            all_of_them &= plane if self.num_voters >> bit & 1 else ~plane
        if self.num_weights % 64:
            all_of_them[-1] &= np.uint64((1 << self.num_weights % 64) - 1)
        return all_of_them

    def most_voted(self, sparsity: float, group: ComparisonGroup, sizes: Sizes | None) -> Words:
        """Packed mask of the most voted weights of each comparison group; see ``select_most_voted``."""
        if not self._large or len(self.planes) > MOST_PLANES:
            return pack(select_most_voted(self.counts(), sparsity, group, sizes))
        from pruning_kernels import most_voted
        from pruning_kernels.most_voted_columns import most_voted_in_columns

        use_threads_of_torch()
        quota = pruned_per_group(self.shape, sparsity, group)
        flat = np.empty(0, np.uint16) if sizes is None else sizes.reshape(-1)
        if group == "layer":
            words = most_voted.most_voted_in_layer(self._room, self.num_weights, quota, flat)
        elif group == "row":
            words = most_voted.most_voted_in_rows(self._room, self.shape, quota, flat)
        elif group == "column":
            words = most_voted_in_columns(self._room, self.shape, quota, flat)
        else:
            words = most_voted.most_voted_in_pattern(
                self._room, self.shape, group_size(self.shape, group), quota, flat
            )
        return words[: self.planes.shape[1]]

    @property
    def _large(self) -> bool:
        return self.num_weights >= WORTH_COMPILING


def select_most_voted(
    counts: NDArray[np.int32], sparsity: float, group: ComparisonGroup, sizes: Sizes | None = None
) -> NDArray[np.bool_]:
    """Prune the weights with most votes in each comparison group (FedPrLLM section 3.2, top-k of the summed masks).

    Parameters
    ----------
    counts : (rows, columns), votes per weight, not negative
    sparsity : share of each group to prune, in [0, 1)
    group : see ``comparison_groups.ComparisonGroup``
    sizes : (rows, columns) or None
        Among weights with equally many votes the smaller size is pruned first, then the lower index; None leaves the index
        alone. The reference code draws a random permutation instead; its seeded form are random sizes.

    Returns
    -------
    NDArray[np.bool_]
        Prune mask, same shape; each group loses exactly ``comparison_groups.pruned_per_group`` weights.
    """
    rows, columns = counts.shape
    quota = pruned_per_group((rows, columns), sparsity, group)
    lines = (-1, group_size((rows, columns), group))
    key = None if sizes is None else sizes & sizes.dtype.type(np.iinfo(sizes.dtype).max >> 1)
    if group == "column":
        key = None if key is None else key.T.reshape(lines)
        return np.ascontiguousarray(
            _select_in_lines(counts.T.reshape(lines), quota, key).reshape(columns, rows).T
        )
    key = None if key is None else key.reshape(lines)
    return _select_in_lines(counts.reshape(lines), quota, key).reshape(rows, columns)


def _select_in_lines(counts: NDArray[np.int32], quota: int, key: Sizes | None) -> NDArray[np.bool_]:
    """Prune ``quota`` weights in each line: all above the line's vote threshold, then the best of those on it."""
    lines, _ = counts.shape
    levels = int(counts.max(initial=0)) + 1
    line_index = np.arange(lines)[:, None]
    histogram = np.bincount(
        (line_index * levels + counts).reshape(-1), minlength=lines * levels
    ).reshape(lines, levels)
    # (lines, levels): weights with that many votes or more.
    at_least = histogram[:, ::-1].cumsum(axis=1)[:, ::-1]
    threshold = (at_least >= quota).sum(axis=1) - 1  # the highest level that still fills the quota
    prune_mask = counts > threshold[:, None]
    missing = quota - prune_mask.sum(axis=1)

    # row-major: by line, then by index.
    tie_line, tie_column = np.nonzero(counts == threshold[:, None])
    if key is not None:
        order = np.lexsort((tie_column, key[tie_line, tie_column], tie_line))
        tie_line = tie_line[order]
        tie_column = tie_column[order]
    first_of_line = np.searchsorted(tie_line, np.arange(lines))
    place = np.arange(tie_line.size) - first_of_line[tie_line]
    chosen = place < missing[tie_line]
    prune_mask[tie_line[chosen], tie_column[chosen]] = True
    return prune_mask
