"""What the clients prune together: count their votes and select the weights with most of them (FedPrLLM steps 3 and 4)."""

import numpy as np
from numpy.typing import NDArray

from pruning_kernels.bitmask import Words, num_words, unpack
from pruning_kernels.selection import ComparisonGroup, group_size, pruned_per_group


class VoteCounter:
    """Votes per weight, held as bit planes: plane ``p`` has bit ``i`` set if weight ``i``'s count has ``2**p`` in it.

    Adding a packed mask is a ripple-carry addition on whole words, so the votes are never unpacked to count them, the
    counter needs ``log2(clients) + 1`` bits per weight, and any number of clients fits.
    """

    def __init__(self, num_weights: int) -> None:
        self.num_weights = num_weights
        self.num_votes = 0
        self._planes: list[Words] = []

    def add(self, prune_mask: Words) -> None:
        """Add one client's packed prune mask, ``(num_words(num_weights),)`` uint64.

        Raises
        ------
        ValueError
            The mask has another number of words.
        """
        if prune_mask.shape != (num_words(self.num_weights),):
            raise ValueError(f"expected {num_words(self.num_weights)} words, got shape {prune_mask.shape}")
        carry = prune_mask
        for index, plane in enumerate(self._planes):
            self._planes[index], carry = plane ^ carry, plane & carry
        if carry.any():
            self._planes.append(carry.copy())
        self.num_votes += 1

    def counts(self) -> NDArray[np.int32]:
        """Votes per weight, ``(num_weights,)``: the aggregated mask matrix of FedPrLLM, flat."""
        counts = np.zeros(self.num_weights, dtype=np.int32)
        for bit, plane in enumerate(self._planes):
            counts += unpack(plane, (self.num_weights,)).astype(np.int32) << bit
        return counts


def select_most_voted(
    counts: NDArray[np.int32], sparsity: float, group: ComparisonGroup, tie_key: NDArray[np.floating] | None = None
) -> NDArray[np.bool_]:
    """Prune the weights with most votes in each comparison group (FedPrLLM section 3.2, top-k of the summed masks).

    Parameters
    ----------
    counts : (rows, columns), votes per weight, not negative
    sparsity : share of each group to prune, in [0, 1)
    group : see ``selection.ComparisonGroup``
    tie_key : (rows, columns) or None
        Among weights with equally many votes the smaller key is pruned first, then the lower index; None leaves the index
        alone. The reference code draws a random permutation instead; its seeded form is a random key.

    Returns
    -------
    NDArray[np.bool_]
        Prune mask, same shape; each group loses exactly ``selection.pruned_per_group`` weights.
    """
    rows, columns = counts.shape
    quota = pruned_per_group((rows, columns), sparsity, group)
    lines = (-1, group_size((rows, columns), group))
    if group == "column":
        key = None if tie_key is None else tie_key.T.reshape(lines)
        return np.ascontiguousarray(_select_in_lines(counts.T.reshape(lines), quota, key).reshape(columns, rows).T)
    key = None if tie_key is None else tie_key.reshape(lines)
    return _select_in_lines(counts.reshape(lines), quota, key).reshape(rows, columns)


def _select_in_lines(counts: NDArray[np.int32], quota: int, key: NDArray[np.floating] | None) -> NDArray[np.bool_]:
    """Prune ``quota`` weights in each line: all above the line's vote threshold, then the best of those on it."""
    lines, _ = counts.shape
    levels = int(counts.max(initial=0)) + 1
    line_index = np.arange(lines)[:, None]
    histogram = np.bincount((line_index * levels + counts).reshape(-1), minlength=lines * levels).reshape(lines, levels)
    at_least = histogram[:, ::-1].cumsum(axis=1)[:, ::-1]  # (lines, levels): weights with that many votes or more
    threshold = (at_least >= quota).sum(axis=1) - 1  # the highest level that still fills the quota
    prune_mask = counts > threshold[:, None]
    missing = quota - prune_mask.sum(axis=1)

    tie_line, tie_column = np.nonzero(counts == threshold[:, None])  # row-major: by line, then by index
    if key is not None:
        order = np.lexsort((tie_column, key[tie_line, tie_column], tie_line))
        tie_line, tie_column = tie_line[order], tie_column[order]
    first_of_line = np.searchsorted(tie_line, np.arange(lines))
    place = np.arange(tie_line.size) - first_of_line[tie_line]
    chosen = place < missing[tie_line]
    prune_mask[tie_line[chosen], tie_column[chosen]] = True
    return prune_mask
