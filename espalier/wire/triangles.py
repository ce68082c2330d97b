"""Upper triangles of symmetric matrices as they travel, row after row, and whether they can be inner products of vectors."""

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-3
"""By what share numbers that were computed may be beyond what is possible."""


def triangle_size(width: int) -> int:
    """Numbers in the upper triangle of a matrix (width, width)."""
    return width * (width + 1) // 2


def diagonal_of(triangle: NDArray[np.float32], width: int) -> NDArray[np.float64]:
    """The diagonal, (width,)."""
    return triangle[np.concatenate([[0], np.cumsum(np.arange(width, 1, -1))])].astype(np.float64)


def are_inner_products(triangle: NDArray[np.float32], width: int, slack: float = 0.0) -> bool:
    """Whether all are finite, none of the diagonal is negative, and no two go together more than their own sizes allow.

    ``slack`` is what a product may be beyond that anyway. A matrix that passes need not have positive eigenvalues.
    """
    if not np.isfinite(triangle).all():
        return False
    diagonal = diagonal_of(triangle, width)
    if diagonal.min() < 0:
        return False
    roots = np.sqrt(diagonal)
    start = 0
    for place, root in enumerate(roots):
        row = triangle[start : start + width - place]
        if (np.abs(row) > root * roots[place:] * (1 + ROUNDING) + slack).any():
            return False
        start += len(row)
    return True
