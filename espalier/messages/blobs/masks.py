"""Prune masks of a block as a blob: flat, one bit per weight (``pruning_kernels.votes.bitmask``)."""

import numpy as np
from numpy.typing import NDArray

from espalier import amounts
from espalier.errors import ProtocolError
from espalier.models.plan import LinearPlan
from pruning_kernels.selection.comparison_groups import (
    pruned_by_group,
    pruned_in_matrix,
    pruned_per_group,
)
from pruning_kernels.votes.bitmask import Words, count, count_rows, has_clean_padding, unpack


def mask_name(linear: str) -> str:
    """Return the tensor name of the prune mask of a matrix."""
    return f"{linear}.prune_mask"


def require_exact_sparsity(
    key: str, linear: LinearPlan, words: Words, sparsity: float, group: str
) -> None:
    """Check that a mask has exactly the sparsity of the settings in each comparison group.

    Parameters
    ----------
    key
        Key of the blob, for errors.
    linear
        Plan of the matrix.
    words
        Packed mask: 1 = pruned.
    sparsity
        Fraction of the weights that are pruned.
    group
        Comparison group: "layer", "row" or a pattern such as "2:4".

    Raises
    ------
    ProtocolError
        If the sparsity differs, or if bits are set after the last weight.
    """
    expected = pruned_in_matrix(linear.shape, sparsity, group)
    if not has_clean_padding(words, linear.num_weights):
        raise ProtocolError(f"{key} {linear.name}: bits are set beyond the last weight")
    if (pruned := count(words)) != expected:
        raise ProtocolError(
            f"{key} {linear.name}: prunes {amounts.count(pruned, 'weight')}, the settings ask for"
            f" {expected}"
        )
    per_group = pruned_per_group(linear.shape, sparsity, group)
    if group != "layer" and (_pruned_by_group(words, linear.shape, group) != per_group).any():
        raise ProtocolError(
            f"{key} {linear.name}: a {group} does not prune exactly {per_group} weights"
        )


def _pruned_by_group(words: Words, shape: tuple[int, int], group: str) -> NDArray[np.int64]:
    return (
        count_rows(words, shape) if group == "row" else pruned_by_group(unpack(words, shape), group)
    )
