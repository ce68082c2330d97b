"""Rearrangement and rescaling, stages 2 and 3 of Mask Tuning.

Source: Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers". Rearrangement
selects again which prunable groups of a kind a block loses, with the same number of groups, by the
Fisher information of all pairs of masks. Rescaling finds, by least squares, the factors with which
the remaining groups best reproduce the output of all groups.
"""

import torch
from torch import Tensor

GROUPS_AT_ONCE = 1024
"""Number of groups whose products with all groups are computed at a time in float64."""


# Rearrangement


def fisher_factor(gradients: Tensor, rows: int) -> Tensor:
    """Return a factor F of the Fisher information of masks.

    ``F^T F`` is ``gradients^T gradients``, or its best approximation of rank ``rows`` (its
    strongest directions). It describes the information as a whole and not the gradients of single
    samples. The result is (rows, groups), float64, on the CPU, zero below the diagonal.

    Parameters
    ----------
    gradients : (samples, groups), floating: gradient of each sample's loss with respect to each
        group's mask
    rows : number of rows of the factor, at most the number of groups; if there are fewer samples,
        the last rows are zero
    """
    exact = gradients.to("cpu", torch.float64)
    samples, groups = exact.shape
    # Only the strongest directions are sent; QR of all samples would have more rows than ``rows``.
    if min(samples, groups) > rows:
        _, strengths, directions = torch.linalg.svd(exact, full_matrices=False)
        exact = strengths[:rows, None] * directions[:rows]
    # R^T R equals the product of the matrix with itself, whatever the number of samples.
    triangle = torch.linalg.qr(exact, mode="r").R
    return torch.cat([triangle, triangle.new_zeros(rows - len(triangle), groups)])


def unpacked_factor(flat: Tensor, rows: int, groups: int) -> Tensor:
    """Return a factor, (rows, groups), from its entries that ``slicing.packed`` returned."""
    full = flat.new_zeros(rows, groups)
    # Row i of an upper triangle has ``groups - i`` entries.
    for place, row in enumerate(flat.split(list(range(groups, groups - rows, -1)))):
        full[place, place:] = row
    return full


def rearranged(factor: Tensor, cut: Tensor) -> Tensor:
    """Select again which groups are cut, as many as before, so that the loss rises less.

    This is the paper's greedy search in one pass. To second order the loss rises by ``c^T I c``,
    with c = 1 for cut groups and ``I = F^T F``. The remaining groups are visited in ascending order
    of their own information. Each is cut, and then the cut group whose return lowers the sum most
    is restored. Of equal ones the group that was just cut is restored, so nothing changes without
    need.

    Parameters
    ----------
    factor : (rows, groups), floating, finite; factors of several parties are stacked
    cut : (groups,), bool: initial choice; the result has as many True entries
    """
    exact = factor.to("cpu", torch.float64)
    now = cut.cpu().clone()
    if not now.any() or now.all():
        return now
    # Diagonal of I, the information of each single mask.
    diagonal = exact.square().sum(dim=0)
    staying = (~now).nonzero().squeeze(1)
    # F c, so that c^T I c is its squared norm.
    total = exact[:, now].sum(dim=1)
    for group in staying[torch.sort(diagonal[staying], stable=True).indices].tolist():
        now[group] = True
        total = total + exact[:, group]
        # Decrease of the sum for the return of each group.
        saved = (2 * (total @ exact) - diagonal).masked_fill(~now, -torch.inf)
        back = int(saved.argmax())
        # Ties go to ``group``; then this step changes nothing.
        back = back if saved[back] > saved[group] else group
        now[back] = False
        total = total - exact[:, back]
    return now


# Rescaling


def joint_outputs(moments: Tensor, weight: Tensor, size: int) -> Tensor:
    """Return the inner products of the groups' contributions to a layer's output.

    They are (groups, groups), float64, symmetric, summed over tokens: ``A^T A`` of the paper's
    least squares problem. The row sums are ``A^T b``, with b the output of all groups.

    Parameters
    ----------
    moments : (features, features), float64: second moments of the matrix's input, summed over
        tokens
    weight : (rows, features), floating: the matrix that reads the groups
    size : number of consecutive features of a group
    """
    pieces = []
    for start in range(0, weight.shape[1], step := GROUPS_AT_ONCE * size):
        # (rows, features of some groups)
        columns_here = weight[:, start : start + step].to(torch.float64)
        for_all = [
            columns_here.T @ columns.to(torch.float64) for columns in weight.split(step, dim=1)
        ]
        # Joint moment of inputs i and j times the inner product of their columns.
        products = torch.cat(for_all, dim=1).mul_(moments[start : start + step])
        # (groups here, size, groups, size): sum over the features of both groups.
        pieces.append(products.view(len(products) // size, size, -1, size).sum(dim=(1, 3)))
    return torch.cat(pieces)


def best_scales(joint: Tensor, aims: Tensor, damping: float) -> Tensor:
    """Return the factors with which the remaining groups best reproduce all groups' output.

    They are (groups,), float64, on the CPU: the minimiser s of ``|A s - b|^2 + d |s - 1|^2``, or
    NaN if the damped ``joint`` is not positive definite.

    Parameters
    ----------
    joint : (groups, groups), floating, symmetric: ``A^T A`` of the remaining groups
    aims : (groups,), floating: ``A^T b``
    damping : damping relative to the mean of the diagonal
    """
    exact = joint.to("cpu", torch.float64)
    # A^T (b - A 1): the system is solved for the deviation of the factors from 1.
    missing = aims.to("cpu", torch.float64) - exact.sum(dim=1)
    # No input reaches the groups, so any factors are as good, and damping would be 0.
    if not exact.any():
        return torch.ones_like(missing)
    factor = _damped_cholesky(exact, damping)
    if factor is None:
        return torch.full_like(missing, torch.nan)
    return 1 + torch.cholesky_solve(missing[:, None], factor).squeeze(1)


def is_positive(joint: Tensor, damping: float) -> bool:
    """Return whether the least squares problem of a symmetric matrix has a solution.

    Every matrix of real inputs has one with this damping.
    """
    exact = joint.to("cpu", torch.float64)
    return not exact.any() or _damped_cholesky(exact, damping) is not None


def _damped_cholesky(matrix: Tensor, damping: float) -> Tensor | None:
    """Return the Cholesky factor of a matrix with damped diagonal; None if there is none."""
    added = damping * matrix.diagonal().mean()
    # Relative damping, so that the condition does not depend on the scale of the inputs.
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(added.expand(len(matrix))))
    return None if failed else factor
