"""Rotating a residual stream onto its principal components, and deleting the minor ones (SliceGPT: Ashkboos et al. 2024).

Signals are rows. A basis is (width, kept): its columns are orthonormal directions of the residual stream, the strongest first.
All products are float64; whoever writes the result rounds it once.
"""

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096
"""Of a matrix or of signals that are in memory in float64."""


def normalised(signals: Tensor, epsilon: float) -> Tensor:
    """Each row over its root mean square, as RMSNorm divides but for its scale.

    Parameters
    ----------
    signals : (..., width), any floating dtype
    epsilon : is added to the mean square

    Returns
    -------
    (..., width), float64
    """
    rows = signals.to(torch.float64)
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)


def second_moments(signals: Tensor) -> Tensor:
    """The sum over rows of the outer product of a row with itself, X^T X (section 3.3).

    Parameters
    ----------
    signals : (tokens, width), any floating dtype

    Returns
    -------
    (width, width), float64, symmetric, where the signals are
    """
    total = torch.zeros(
        signals.shape[1], signals.shape[1], dtype=torch.float64, device=signals.device
    )
    for rows in signals.split(ROWS_AT_ONCE):
        exact = rows.to(torch.float64)
        total.addmm_(exact.T, exact)
    return total


def packed(moments: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix (width, width), row after row: (width * (width + 1) / 2,)."""
    return torch.cat([row[place:] for place, row in enumerate(moments)])


def unpacked(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix (width, width) of an upper triangle."""
    full = triangle.new_empty(width, width)
    for place, row in enumerate(triangle.split(list(range(width, 0, -1)))):
        full[place, place:] = full[place:, place] = row
    return full


def principal_basis(moments: Tensor, kept: int) -> Tensor:
    """The directions in which signals are strongest: eigenvectors of their second moments, by falling eigenvalue.

    The entry of a direction that is largest in magnitude, of several the first, is positive: so signs do not hang on the
    library that found them.

    Parameters
    ----------
    moments : (width, width), symmetric; their scale does not matter
    kept : how many directions, at most ``width``

    Returns
    -------
    (width, kept), float64, orthonormal columns, on the CPU
    """
    _, vectors = torch.linalg.eigh(moments.to("cpu", torch.float64))
    strongest = vectors.flip(1)[:, :kept]
    largest = strongest.gather(0, strongest.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -strongest, strongest).contiguous()


def kept_share(moments: Tensor, basis: Tensor) -> float:
    """Which share of the signals' squared length lies in a basis; 1 where there is no signal at all."""
    exact = moments.to("cpu", torch.float64)
    whole = exact.trace()
    return min(1.0, float(((exact @ basis) * basis).sum() / whole)) if whole > 0 else 1.0


def sliced_reader(weight: Tensor, basis: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """A matrix that reads the residual stream, behind a norm whose scale goes into it: W diag(scale) Q (figure 4).

    Parameters
    ----------
    weight : (rows, width), any floating dtype; an embedding is one too, whose rows are signals
    basis : (width, kept), float64
    scale : (width,) or one number

    Returns
    -------
    (rows, kept), float64
    """
    side = scale.to(torch.float64) if isinstance(scale, Tensor) else scale
    return torch.cat(
        [(rows.to(torch.float64) * side) @ basis for rows in weight.split(ROWS_AT_ONCE)]
    )


def sliced_writer(weight: Tensor, basis: Tensor) -> Tensor:
    """A matrix or a bias that is added to the residual stream: Q^T W.

    Parameters
    ----------
    weight : (width, columns) or (width,), any floating dtype
    basis : (width, kept), float64

    Returns
    -------
    (kept, columns) or (kept,), float64
    """
    return basis.T @ weight.to(torch.float64)


def shortcut(before: Tensor, behind: Tensor) -> Tensor:
    """What leads the residual stream from one basis to the next, as the weight of a linear: (Q_before^T Q_behind)^T.

    Parameters
    ----------
    before, behind : (width, kept), float64

    Returns
    -------
    (kept of behind, kept of before), float64
    """
    return behind.T @ before
