"""SparseGPT: prune the weights with the lowest cost, and update the weights to their right.

Source: Frantar & Alistarh 2023, https://arxiv.org/abs/2301.00774, algorithm 1. Columns are decided
from left to right. H is the damped Gram matrix of a layer's inputs, and U the upper Cholesky factor
of its inverse, ``H^-1 = U^T U``. When the columns before j are decided, the optimal brain surgeon
needs the first row of the inverse of the remaining part of H, ``(H_j:,j:)^-1``. Row j of U is this
row divided by the root of its first entry.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pruning_kernels.compiler import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.selection.selection import select_number

PAPER_DAMPING = 0.01
LEAF = 256
"""Maximum size of a diagonal block of H that LAPACK factorises directly."""


class NoFactorError(ValueError):
    """Gram matrix without a Cholesky factor at any damping."""


@dataclass(frozen=True, eq=False)
class Factor:
    """Information on a layer's inputs for SparseGPT; layers with the same inputs share it."""

    upper: Tensor
    """(in_features, in_features), float32: U, zero below the diagonal.

    ``U^T U`` is the inverse of the damped Gram matrix.
    """
    damping: float
    """Fraction of the mean diagonal that was added to the diagonal."""
    dead: Tensor
    """(in_features,), bool: channels that were zero for every token."""


def factorise(
    gram: Tensor, damping: float = PAPER_DAMPING, dead_diagonal: float | None = None
) -> Factor:
    """Return the Cholesky factor of the inverse of a damped Gram matrix (SparseGPT section 3.4).

    Parameters
    ----------
    gram : (in_features, in_features), float32, sum over calibration tokens of x x^T, times any
        positive number; not changed. In addition to it, memory holds the result, a float32 matrix
        of the same size, and a third of one.
    damping : fraction of the mean diagonal, in [0, 1], that is added to the diagonal. If the damped
        matrix has no Cholesky factor, ten times as much is added, up to 1. The result has the final
        value.
    dead_diagonal : value of a dead channel in the mean diagonal, in the scale of ``gram``; None:
        dead channels are left out of the mean

    Raises
    ------
    NotFiniteError
        ``gram`` has NaN or infinity.
    NoFactorError
        ``gram`` has no factor with the highest damping either.

    Notes
    -----
    The published code takes three steps: the factor of H, the inverse of H, and the factor of the
    inverse. Here H = R R^T with R upper triangular, so that U is R^-1. It is the same matrix,
    because a Cholesky factor is unique. The published code sets a dead channel's diagonal to 1 of
    H = 2 / n x x^T, summed over n samples, which corresponds to ``dead_diagonal = n / 2``. Its
    damping then depends on the scale of the inputs.
    """
    _require_finite(
        gram,
        "the calibration activations contain NaN or infinity; use dtype float32 or check the model",
    )
    # A dead channel has a zero diagonal. It gets 1, so that H stays positive definite.
    diagonal = gram.diagonal().to(torch.float32)
    dead = diagonal == 0
    if dead_diagonal is None:
        mean = diagonal.sum() / (~dead).sum().clamp(min=1)
    else:
        mean = (diagonal.sum() + dead_diagonal * dead.sum()) / len(diagonal)
    upper = torch.empty(gram.shape, dtype=torch.float32, device=gram.device)
    # Raise the damping until a factor exists; rank-deficient inputs need more than 1%.
    while True:
        # The factorisation overwrites ``upper``, so every attempt starts from ``gram``.
        upper.copy_(gram).diagonal().add_(damping * mean).masked_fill_(dead, 1)
        if _inverse_root(upper) and bool(torch.isfinite(upper.diagonal()).all()):
            return Factor(upper, damping, dead)
        if damping == 1:
            raise NoFactorError(
                "the gram of the inputs has no Cholesky factor, with damping 1.0 either: it is not"
                " a sum of x x^T"
            )
        damping = min(10 * damping, 1.0) if damping else PAPER_DAMPING


def prune(
    weight: Tensor,
    factor: Factor,
    sparsity: float,
    pattern: tuple[int, int] | None = None,
    block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Prune a matrix and update the remaining weights (SparseGPT, algorithm 1).

    Parameters
    ----------
    weight : (out_features, in_features), any float dtype, on the device of ``factor``; not changed
    factor : factor of the Gram matrix of the layer's inputs
    sparsity : fraction of the weights to prune, in [0, 1); a pattern implies its own
    pattern : (n, m), keep n of each m consecutive weights of a row; or None
    block_size : number of columns whose weights compete with each other, in all rows

    Returns
    -------
    prune_mask : Tensor
        bool, shaped like ``weight``, True for pruned weights. The scores are ``W_ij^2 / U_jj^2`` of
        weights that earlier blocks have updated. After each block exactly ``int(number *
        sparsity)`` of the weights so far are pruned; of equal scores the lower row-major index
        within the block is pruned first. (The published code prunes all scores up to a threshold,
        one more in each block.) In a pattern, m weights are compared when their column is reached,
        so updates within the block count as well.
    weight : Tensor
        float32, the updated weights; exactly 0 if pruned or in a dead channel

    Raises
    ------
    ValueError
        m does not divide both the columns and the block size.
    NotFiniteError
        A weight is NaN or infinite, or became so.

    Notes
    -----
    In addition to the result, memory holds one float32 matrix of its size. Large matrices on a CPU
    use the compiled kernel, whose weights differ from those of the plain form in the last bits.
    Both are deterministic for a given number of threads.
    """
    if pattern is not None and (weight.shape[1] % pattern[1] or block_size % pattern[1]):
        raise ValueError(
            f"pattern {pattern[0]}:{pattern[1]} does not divide rows of {weight.shape[1]} weights"
            f" in blocks of {block_size}"
        )
    # A contiguous copy: the kernels work on its memory.
    updated = weight.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _require_finite(updated, "the weights contain NaN or infinity; check the model")
    # No input reaches a dead channel, so its weights are free to prune.
    updated[:, factor.dead] = 0
    compiled = weight.device.type == "cpu" and weight.numel() >= WORTH_COMPILING
    errors = torch.empty_like(updated)
    prune_mask = torch.zeros_like(updated, dtype=torch.bool)
    rows, columns = weight.shape
    for number, start in enumerate(range(0, columns, block_size), 1):
        end = min(start + block_size, columns)
        block_columns = slice(start, end)
        # 1. Choose the pruned weights of this block.
        upper = factor.upper[block_columns, block_columns].contiguous()
        block = _Block(upper, updated[:, block_columns], prune_mask[:, block_columns])
        if pattern is None:
            # A difference of totals, so that rounding does not accumulate over the blocks.
            quota = int(rows * end * sparsity) - int(rows * start * sparsity)
            block.prune_mask.copy_(
                select_number(block.weight, quota, "layer", block.reciprocals, compiled)
            )
        # 2. Prune them column by column, updating the columns to their right within the block.
        (_solve_compiled if compiled else _solve_plain)(block, pattern, errors[:, start:end])
        # 3. Update later blocks.
        # ``number & -number`` is the largest power of two that divides the number of blocks.
        _propagate(updated, errors, factor.upper, end, (number & -number) * block_size)
    _require_finite(
        updated, "the updated weights contain NaN or infinity; raise the damping or check the model"
    )
    return prune_mask, updated


def sparsegpt_score(weight: Tensor, factor: Factor) -> Tensor:
    """Return SparseGPT's score ``W_ij^2 / (H^-1)_jj`` without updates (Sun et al. 2023, table 1).

    ``(H^-1)_jj`` is the squared norm of column j of U. The weight can have any float dtype; the
    result is float32, has its shape, and is 0 in dead channels.

    Raises
    ------
    NotFiniteError
        A weight is NaN or infinite.
    """
    _require_finite(weight, "the weights contain NaN or infinity; check the model")
    # Column j of U has the norm sqrt((H^-1)_jj).
    norms = torch.linalg.vector_norm(factor.upper, dim=0)
    return weight.to(torch.float32).div(norms).square_().masked_fill_(factor.dead, 0)


@dataclass(frozen=True, eq=False)
class _Block:
    """Columns that are decided together; ``weight`` and ``prune_mask`` are views."""

    upper: Tensor
    weight: Tensor
    prune_mask: Tensor

    @property
    def reciprocals(self) -> Tensor:
        """1 / U_jj of each column."""
        return self.upper.diagonal().reciprocal()


def _solve_plain(block: _Block, pattern: tuple[int, int] | None, errors: Tensor) -> None:
    """Set pruned weights to 0, column by column, and update the block's weights to their right.

    ``errors``, (rows, width), is filled with the change of each pruned weight divided by U_jj,
    which later blocks compensate.
    """
    weight = block.weight
    upper = block.upper
    reciprocals = block.reciprocals
    # Left to right: a column's update must be complete before it is decided.
    for column in range(weight.shape[1]):
        # A pattern is chosen when its first column is reached, with all updates so far.
        if pattern is not None and column % pattern[1] == 0:
            group = slice(column, column + pattern[1])
            quota = pattern[1] - pattern[0]
            block.prune_mask[:, group] = select_number(
                weight[:, group], quota, "row", reciprocals[group], compiled=False
            )
        pruned = block.prune_mask[:, column]
        error = (weight[:, column] * reciprocals[column]).mul_(pruned)
        errors[:, column] = error
        # Optimal brain surgeon: w_k -= (w_j / U_jj) U_jk for all k > j.
        weight[:, column + 1 :].addr_(error, upper[column, column + 1 :], alpha=-1)
        # Exactly zero, whatever the update left by rounding.
        weight[:, column].masked_fill_(pruned, 0)


def _solve_compiled(block: _Block, pattern: tuple[int, int] | None, errors: Tensor) -> None:
    """Do the same as ``_solve_plain`` with the kernel of ``sparsegpt_columns``."""
    from pruning_kernels import sparsegpt_columns

    width = block.weight.shape[1]
    n, m = pattern or (width, width)
    # ``solve_rows`` reads whole strips; zeros on the right change nothing.
    strips = torch.zeros(width, -(-width // sparsegpt_columns.STRIP) * sparsegpt_columns.STRIP)
    strips[:, :width] = block.upper
    sparsegpt_columns.solve_rows(
        block.weight.numpy(),
        strips.numpy(),
        block.reciprocals.numpy(),
        m,
        m - n,
        use_threads_of_torch(),
        block.prune_mask.numpy(),
        errors.numpy(),
    )


def _propagate(updated: Tensor, errors: Tensor, upper: Tensor, end: int, width: int) -> None:
    """Apply the errors of the ``width`` columns before ``end`` to the next ``width`` columns.

    The published code applies each block's errors to all columns on the right, and so reads and
    writes all of them for every block. Here ``width`` is the block size times the largest power of
    two that divides the number of blocks so far. Each block still has all earlier errors when it is
    decided, and each pair of blocks meets once, but the matrix products are fewer and larger.
    """
    right = slice(end, min(end + width, updated.shape[1]))
    updated[:, right].addmm_(
        errors[:, end - width : end], upper[end - width : end, right], alpha=-1
    )


def _inverse_root(square: Tensor) -> bool:
    """Replace a positive definite matrix H = R R^T, R upper triangular, by R^-1.

    Returns False if H is not positive definite. The recursion by halves leaves nearly all work to
    matrix products: ``H = [[A, B], [B^T, C]]`` has ``R_22 R_22^T = C``, ``R_12 = B R_22^-T`` and
    ``R_11 R_11^T = A - R_12 R_12^T``.
    """
    half = square.shape[0] // 2
    if square.shape[0] <= LEAF:
        # LAPACK computes lower factors, so the rows and columns of H are reversed.
        lower, failed = torch.linalg.cholesky_ex(square.flip(0, 1))
        if bool(failed):
            return False
        identity = torch.eye(square.shape[0], device=square.device)
        square.copy_(torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1))
        return True
    a = square[:half, :half]
    b = square[:half, half:]
    # 1. R_22 from C; ``c`` becomes R_22^-1.
    c = square[half:, half:]
    if not _inverse_root(c):
        return False
    # 2. R_12 = B R_22^-T, and the Schur complement of A.
    root = b @ c.T
    a.addmm_(root, root.T, alpha=-1)
    # 3. R_11 from the complement; ``a`` becomes R_11^-1.
    if not _inverse_root(a):
        return False
    # 4. The upper right part of R^-1 is -R_11^-1 R_12 R_22^-1.
    torch.mm(root, c, out=b)
    torch.neg(torch.mm(a, b, out=root), out=b)
    square[half:, :half].zero_()
    return True


def _require_finite(numbers: Tensor, text: str) -> None:
    """Raise ``NotFiniteError`` with this text for NaN or infinity, without a matrix of flags."""
    # Minimum and maximum are NaN if any number is.
    if numbers.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(numbers))).all()):
        raise NotFiniteError(text)
