"""Upper triangles of symmetric matrices in row-major order, and a check for Gram matrices."""

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-3
"""Relative tolerance for rounding errors."""


def triangle_size(width: int) -> int:
    """Return the number of entries in the upper triangle of a (width, width) matrix."""
    return width * (width + 1) // 2


def diagonal_of(triangle: NDArray[np.float32], width: int) -> NDArray[np.float64]:
    """Return the diagonal of a matrix from its upper triangle, (width,)."""
    # Row i has width - i entries and begins with its diagonal entry.
    return triangle[np.concatenate([[0], np.cumsum(np.arange(width, 1, -1))])].astype(np.float64)


def are_inner_products(triangle: NDArray[np.float32], width: int, slack: float = 0.0) -> bool:
    """Return True if the entries can be inner products of ``width`` vectors.

    All entries must be finite and the diagonal must not be negative. No entry may exceed the
    product of the norms of its two vectors (Cauchy-Schwarz). These conditions are necessary, not
    sufficient: the matrix may have negative eigenvalues.

    Parameters
    ----------
    triangle : upper triangle, row by row
    slack : absolute tolerance of the Cauchy-Schwarz check, in addition to ``ROUNDING``
    """
    if not np.isfinite(triangle).all():
        return False
    diagonal = diagonal_of(triangle, width)
    if diagonal.min() < 0:
        return False
    roots = np.sqrt(diagonal)
    start = 0
    # Row by row, so that no (width, width) matrix is needed.
    for index, root in enumerate(roots):
        row = triangle[start : start + width - index]
        if (np.abs(row) > root * roots[index:] * (1 + ROUNDING) + slack).any():
            return False
        start += len(row)
    return True
