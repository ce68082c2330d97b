"""Comparison groups: weights that compete with each other, and their quotas."""

import re
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ComparisonGroup = Literal["layer", "row", "column"] | str
"""Weights that compete with each other (FedPrLLM 3.2.1).

- ``layer``: the whole matrix
- ``row``: one output row
- ``column``: one input column
- ``n:m``: m consecutive weights of a row, of which n are kept
"""

_PATTERN = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


def parse_pattern(group: ComparisonGroup) -> tuple[int, int] | None:
    """Return (n, m) of an n:m pattern with 0 < n < m, which keeps n of m weights; else None."""
    match = _PATTERN.fullmatch(group)
    pattern = (int(match[1]), int(match[2])) if match else (0, 0)
    return pattern if pattern[0] < pattern[1] else None


def group_size(shape: tuple[int, int], group: ComparisonGroup) -> int:
    """Return the number of weights in every comparison group of a matrix.

    Raises
    ------
    ValueError
        The group is unknown, or an n:m pattern does not divide the rows of the matrix.
    """
    rows, columns = shape
    if (pattern := parse_pattern(group)) is not None:
        if columns % pattern[1]:
            raise ValueError(
                f"pattern {group} does not divide rows of {columns} weights; choose an n:m with an"
                f" m that divides {columns}"
            )
        return pattern[1]
    sizes = {"layer": rows * columns, "row": columns, "column": rows}
    if group not in sizes:
        raise ValueError(f"comparison group {group!r} is unknown")
    return sizes[group]


def pruned_per_group(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Return the number of weights that every comparison group loses.

    It is ``int(group size * sparsity)``, or m - n of a pattern n:m.
    """
    size = group_size(shape, group)
    pattern = parse_pattern(group)
    return int(size * sparsity) if pattern is None else pattern[1] - pattern[0]


def pruned_in_matrix(shape: tuple[int, int], sparsity: float, group: ComparisonGroup) -> int:
    """Return the number of weights that a matrix loses over all comparison groups."""
    rows, columns = shape
    return rows * columns // group_size(shape, group) * pruned_per_group(shape, sparsity, group)


def pruned_by_group(prune_mask: NDArray[np.bool_], group: ComparisonGroup) -> NDArray[np.int64]:
    """Return the number of weights that each comparison group loses: (number of groups,).

    Parameters
    ----------
    prune_mask : (rows, columns)
    """
    rows, columns = prune_mask.shape
    lines = (prune_mask.T if group == "column" else prune_mask).reshape(
        -1, group_size((rows, columns), group)
    )
    return lines.sum(axis=1, dtype=np.int64)
