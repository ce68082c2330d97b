"""Scores of weights, by which local pruning ranks them."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Number of rows whose RIA scores are computed together, to stay in the second-level cache."""


class NotFiniteError(ValueError):
    """NaN or infinity among numbers to compare; the text does not contain the numbers."""


@dataclass(frozen=True, eq=False)
class RiaSums:
    """Sums of the magnitudes of a matrix, float32.

    A sum of 0 is replaced by infinity, so that a weight's fraction of it is 0.
    """

    rows: Tensor
    """(out_features,)"""
    columns: Tensor
    """(in_features,)"""


def relative_score(weight: Tensor, sums: RiaSums, factors: Tensor) -> Tensor:
    """Return the RIA score of each weight, float32, (out_features, in_features).

    It is ``(|W_ij| / sum_j |W_ij| + |W_ij| / sum_i |W_ij|) * factors_j`` (Zhang et al. 2024, eq.
    4); in a row or column of zeros a weight's fraction of the sum is 0. Each operation is rounded,
    so that all implementations have the same bits.
    """
    size = weight.to(torch.float32).abs()
    # In place, because a second matrix would cost time to write and read.
    for first in range(0, len(size), ROWS_AT_ONCE):
        score = size[first : first + ROWS_AT_ONCE]
        share_of_column = score / sums.columns
        # The order of the operations defines the bits; ``lowest_scores._share`` has the same one.
        score.div_(sums.rows[first : first + ROWS_AT_ONCE, None]).add_(share_of_column).mul_(
            factors
        )
    return size


def ria_sums(weight: Tensor) -> RiaSums:
    """Return the row and column sums of a matrix's magnitudes for RIA, in one pass.

    torch sums a row in float32, and a column within ``ROWS_AT_ONCE`` rows. These partial sums are
    added in float64, one after the other, so the result does not depend on how the scores are
    computed later. On a CPU one thread computes them at the speed of its cache. Several threads
    would wait for each other after every batch of rows, for long on a busy machine.
    """
    rows = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    columns = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    at_once = torch.empty(
        (ROWS_AT_ONCE, weight.shape[1]), dtype=torch.float32, device=weight.device
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for first in range(0, len(weight), ROWS_AT_ONCE):
            some = weight[first : first + ROWS_AT_ONCE]
            # The copy converts to float32 and reuses the same buffer, which stays in the cache.
            size = at_once[: len(some)].copy_(some).abs_()
            torch.sum(size, dim=1, out=rows[first : first + ROWS_AT_ONCE])
            columns += size.sum(dim=0)
    finally:
        torch.set_num_threads(threads)
    rows, columns = (
        torch.where(sums == 0, torch.inf, sums.to(torch.float32)) for sums in (rows, columns)
    )
    return RiaSums(rows, columns)


def ria_factors(weight: Tensor, input_square_sum: Tensor) -> Tensor:
    """Return RIA's ``||X_j||_2 ** 0.5`` of each input channel, float32."""
    return wanda_factors(weight, input_square_sum) ** 0.5


def wanda_factors(weight: Tensor, input_square_sum: Tensor) -> Tensor:
    """Return ``||X_j||_2`` of each input channel j, float32, for Wanda's score.

    The score is ``|W_ij| * ||X_j||_2`` (Sun et al. 2023, eq. 1; FedPrLLM section 2.1). The papers
    divide the squared norm by the number of sequences. A constant factor does not change the order
    of one matrix's weights, so it is left out.

    Parameters
    ----------
    weight : (out_features, in_features), any float dtype
    input_square_sum : (in_features,), sum over calibration tokens of the squared input of each
        channel

    Raises
    ------
    ValueError
        The shapes do not match.
    NotFiniteError
        An activation is not finite.
    """
    if input_square_sum.shape != weight.shape[1:]:
        raise ValueError(
            f"weight {tuple(weight.shape)} needs {weight.shape[1]} input norms, got"
            f" {tuple(input_square_sum.shape)}"
        )
    if not bool(torch.isfinite(input_square_sum).all()):
        raise NotFiniteError(
            "the calibration activations contain NaN or infinity; use dtype float32 or check the"
            " model"
        )
    # The root in the dtype of the sums, then one rounding.
    return input_square_sum.sqrt().to(torch.float32)
