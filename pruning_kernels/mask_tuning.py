"""Mask Tuning's second and third stage (Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers").

Rearrangement chooses again which units of a kind go in a block, as many as before, under the Fisher information of all pairs of
masks. Rescaling finds, by least squares, the factors with which the units that stay do best what all of them did. Units are an
attention group or a feed-forward channel each; what they are is the caller's.
"""

import torch
from torch import Tensor

UNITS_AT_ONCE = 1024
"""Of which products with all units are made in float64."""


# ----- rearrangement ------------------------------------------------------------------------------------------------------


def fisher_factor(gradients: Tensor, rows: int) -> Tensor:
    """A factor of the Fisher information of masks: as many numbers as the information has, and not those of single windows.

    Parameters
    ----------
    gradients : (windows, units), floating: of the loss of each window by each unit's mask
    rows : of the factor, at most ``units``; fewer windows leave rows of zeros

    Returns
    -------
    (rows, units), float64, on the CPU: zero below the diagonal; its ``F^T F`` is ``gradients^T gradients``, or where more
    windows than rows say more than a factor of so few rows can, the nearest that one can be (its strongest directions)
    """
    exact = gradients.to("cpu", torch.float64)
    windows, units = exact.shape
    if min(windows, units) > rows:
        _, strengths, directions = torch.linalg.svd(exact, full_matrices=False)
        exact = strengths[:rows, None] * directions[:rows]
    found = torch.linalg.qr(exact, mode="r").R
    return torch.cat([found, found.new_zeros(rows - len(found), units)])


def packed_factor(factor: Tensor) -> Tensor:
    """What of a factor (rows, units) is not zero by its form, row after row: (rows * units - rows * (rows - 1) / 2,)."""
    return torch.cat([row[place:] for place, row in enumerate(factor)])


def unpacked_factor(flat: Tensor, rows: int, units: int) -> Tensor:
    """The factor (rows, units) of what ``packed_factor`` gave."""
    full = flat.new_zeros(rows, units)
    for place, row in enumerate(flat.split(list(range(units, units - rows, -1)))):
        full[place, place:] = row
    return full


def rearranged(factor: Tensor, cut: Tensor) -> Tensor:
    """Choose again which units go, as many as before, so that the loss rises less: the paper's greedy search, one pass.

    By second order the loss rises with ``c^T I c``, where c is 1 for units that are cut and ``I = F^T F``. The units that stay
    are gone through, those of the least own information first: each is cut, and of all that are cut then the one comes back
    without which the sum is lowest. Of equal ones the unit comes back that was just cut, so nothing changes without need.

    Parameters
    ----------
    factor : (rows, units), floating, finite: those of several parties stand below each other
    cut : (units,), bool: where the search begins

    Returns
    -------
    (units,), bool: as many are True; the sum is not above that of ``cut``
    """
    exact = factor.to("cpu", torch.float64)
    now = cut.cpu().clone()
    if not now.any() or now.all():
        return now
    own = exact.square().sum(dim=0)
    staying = (~now).nonzero().squeeze(1)
    total = exact[:, now].sum(dim=1)
    for unit in staying[torch.sort(own[staying], stable=True).indices].tolist():
        now[unit] = True
        total = total + exact[:, unit]
        # By which the sum falls if a unit comes back.
        saved = (2 * (total @ exact) - own).masked_fill(~now, -torch.inf)
        back = int(saved.argmax())
        back = back if saved[back] > saved[unit] else unit
        now[back] = False
        total = total - exact[:, back]
    return now


# ----- rescaling ----------------------------------------------------------------------------------------------------------


def joint_outputs(moments: Tensor, weight: Tensor, size: int) -> Tensor:
    """How what the units add to a layer's output goes together: for each two the sum over tokens of their inner product.

    Parameters
    ----------
    moments : (features, features), float64: second moments of the matrix's input, summed over tokens
    weight : (rows, features), floating: the matrix that reads the units
    size : features of one unit, next to each other

    Returns
    -------
    (units, units), float64, symmetric; ``A^T A`` of the paper's least squares, its row sums are ``A^T b`` where b is what all
    units give together
    """
    pieces = []
    for start in range(0, weight.shape[1], step := UNITS_AT_ONCE * size):
        own = weight[:, start : start + step].to(torch.float64)
        for_all = [own.T @ columns.to(torch.float64) for columns in weight.split(step, dim=1)]
        products = torch.cat(for_all, dim=1).mul_(moments[start : start + step])
        pieces.append(products.view(len(products) // size, size, -1, size).sum(dim=(1, 3)))
    return torch.cat(pieces)


def best_scales(joint: Tensor, aims: Tensor, damping: float) -> Tensor:
    """Factors of the units that stay, with which their sum comes nearest to what all units gave: damped least squares about 1.

    Parameters
    ----------
    joint : (units, units), floating, symmetric: ``A^T A`` of the units that stay
    aims : (units,), floating: ``A^T b``
    damping : in parts of the mean of the diagonal; it draws factors to 1

    Returns
    -------
    (units,), float64, on the CPU: the s of least ``|A s - b|^2 + d |s - 1|^2``; NaN where ``joint`` is no such matrix
    """
    exact = joint.to("cpu", torch.float64)
    missing = aims.to("cpu", torch.float64) - exact.sum(dim=1)
    if not exact.any():
        return torch.ones_like(missing)
    factor = _damped_cholesky(exact, damping)
    if factor is None:
        return torch.full_like(missing, torch.nan)
    return 1 + torch.cholesky_solve(missing[:, None], factor).squeeze(1)


def is_positive(joint: Tensor, damping: float) -> bool:
    """Whether a symmetric matrix (units, units) has a least squares solution with this damping, as every real one has."""
    exact = joint.to("cpu", torch.float64)
    return not exact.any() or _damped_cholesky(exact, damping) is not None


def _damped_cholesky(matrix: Tensor, damping: float) -> Tensor | None:
    """The Cholesky factor of a matrix to whose diagonal some parts of its mean are added; None where there is none."""
    added = damping * matrix.diagonal().mean()
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(added.expand(len(matrix))))
    return None if failed else factor
