"""Rotation of a residual stream to its principal components, and removal of the minor ones.

Source: SliceGPT, Ashkboos et al. 2024. Signals are rows. A basis is (width, kept): its columns are
orthonormal directions of the residual stream, the strongest first. All products are computed in
float64; the caller rounds the result once.
"""

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096
"""Number of rows of a matrix or of signals that are in memory in float64."""


def normalised(signals: Tensor, epsilon: float) -> Tensor:
    """Return each row divided by its root mean square, as in RMSNorm without its scale.

    ``signals`` are (..., width), any floating dtype; ``epsilon`` is added to the mean square. The
    result has their shape and is float64.
    """
    rows = signals.to(torch.float64)
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)


def second_moments(signals: Tensor) -> Tensor:
    """Return X^T X, the sum over rows of the outer product of a row with itself (section 3.3).

    ``signals`` are (tokens, width), any floating dtype. The result is (width, width), float64,
    symmetric, on their device.
    """
    width = signals.shape[1]
    total = signals.new_zeros(width, width, dtype=torch.float64)
    for rows in signals.split(ROWS_AT_ONCE):
        exact = rows.to(torch.float64)
        total.addmm_(exact.T, exact)
    return total


def packed(moments: Tensor) -> Tensor:
    """Return the entries of a matrix on and above the diagonal, row by row.

    The result is (rows * columns - rows * (rows - 1) / 2,); there are at most as many rows as
    columns.
    """
    return torch.cat([row[place:] for place, row in enumerate(moments)])


def unpacked(triangle: Tensor, width: int) -> Tensor:
    """Return the symmetric matrix, (width, width), whose upper triangle ``packed`` returned."""
    full = triangle.new_empty(width, width)
    for place, row in enumerate(triangle.split(list(range(width, 0, -1)))):
        full[place, place:] = full[place:, place] = row
    return full


def principal_basis(moments: Tensor, kept: int) -> Tensor:
    """Return the ``kept`` strongest directions of signals: eigenvectors of their second moments.

    ``moments`` are (width, width), symmetric; their scale does not matter. The directions are the
    columns of a (width, kept) matrix, float64, on the CPU, in descending order of eigenvalue. In
    each the first entry with the largest magnitude is positive, so that signs do not depend on the
    library.
    """
    # ``eigh`` returns eigenvalues in ascending order; on the CPU, so that all devices agree.
    _, vectors = torch.linalg.eigh(moments.to("cpu", torch.float64))
    strongest = vectors.flip(1)[:, :kept]
    # Eigenvectors are unique up to sign only.
    largest = strongest.gather(0, strongest.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -strongest, strongest).contiguous()


def kept_share(moments: Tensor, basis: Tensor) -> float:
    """Return the fraction of the signals' energy within a basis; 1 if there are no signals.

    The energy is the sum of squared lengths.
    """
    exact = moments.to("cpu", torch.float64)
    total = exact.trace()
    # trace(Q^T M Q), without the product for all pairs of columns.
    return min(1.0, float(((exact @ basis) * basis).sum() / total)) if total > 0 else 1.0


def sliced_reader(weight: Tensor, basis: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return a sliced matrix that reads the residual stream: W diag(scale) Q (figure 4).

    The scale of the norm before the matrix is merged into it. The result is (rows, kept), float64.

    Parameters
    ----------
    weight : (rows, width), any floating dtype; also an embedding, whose rows are signals
    basis : (width, kept), float64
    scale : (width,) or one number
    """
    # Scaling the columns of W is scaling the inputs, as the norm does.
    side = scale.to(torch.float64) if isinstance(scale, Tensor) else scale
    return torch.cat(
        [(rows.to(torch.float64) * side) @ basis for rows in weight.split(ROWS_AT_ONCE)]
    )


def sliced_writer(weight: Tensor, basis: Tensor) -> Tensor:
    """Return a sliced matrix or bias that is added to the residual stream: Q^T W.

    ``weight`` is (width, columns) or (width,), any floating dtype, and ``basis`` (width, kept),
    float64. The result is (kept, columns) or (kept,), float64.
    """
    return basis.T @ weight.to(torch.float64)


def shortcut(before: Tensor, behind: Tensor) -> Tensor:
    """Return the weight of the linear from one basis to the next: (Q_before^T Q_behind)^T.

    Both are (width, kept), float64; the result is (kept of behind, kept of before).
    """
    return behind.T @ before
