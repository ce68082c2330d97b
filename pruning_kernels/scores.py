"""How much a weight matters to one client: the score by which local pruning ranks weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Rows whose RIA scores are made together: what is known of them stays in the second cache."""


class NotFiniteError(ValueError):
    """NaN or infinity where numbers are to be compared; the text holds no number of them."""


@dataclass(frozen=True, eq=False)
class RiaSums:
    """Sums of the magnitudes of a matrix, float32; infinity in place of 0, of which no weight has a share."""

    rows: Tensor
    """(out_features,)"""
    columns: Tensor
    """(in_features,)"""


def magnitude_score(weight: Tensor) -> Tensor:
    """Absolute value of each weight, float32, same shape as ``weight``."""
    return weight.to(torch.float32).abs()


def wanda_score(weight: Tensor, input_square_sum: Tensor) -> Tensor:
    """Wanda score ``|W_ij| * ||X_j||_2`` (Sun et al. 2023, eq. 1; FedPrLLM section 2.1).

    Parameters
    ----------
    weight : (out_features, in_features), any float dtype
    input_square_sum : (in_features,), sum over calibration tokens of the squared input of each channel

    Returns
    -------
    Tensor
        float32, same shape as ``weight``. The papers divide the squared norm by the number of sequences; a constant
        factor changes no comparison between weights of one matrix, so it is left out.

    Raises
    ------
    ValueError
        The shapes do not fit.
    NotFiniteError
        An activation is not finite.
    """
    return magnitude_score(weight).mul_(wanda_factors(weight, input_square_sum))


def ria_score(weight: Tensor, input_square_sum: Tensor, exponent: float = 0.5) -> Tensor:
    """RIA score ``(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * ||X_j||_2 ** exponent`` (Zhang et al. 2024, eq. 4).

    Parameters
    ----------
    weight : (out_features, in_features), any float dtype
    input_square_sum : (in_features,), see ``wanda_score``; its constant factor changes no comparison here either
    exponent : strength of the activations, 0.5 in the paper

    Returns
    -------
    Tensor
        float32, same shape as ``weight``; a weight in a row or column of zeros has no share of it (0).

    Raises
    ------
    ValueError, NotFiniteError
        See ``wanda_score``.
    """
    return relative_score(weight, ria_sums(weight), ria_factors(weight, input_square_sum, exponent))


def relative_score(weight: Tensor, sums: RiaSums, factors: Tensor) -> Tensor:
    """``(|W_ij| / rows_i + |W_ij| / columns_j) * factors_j``, float32, each operation rounded: see ``ria_score``."""
    size = magnitude_score(weight)
    # In place, so that no second matrix is written and read.
    for first in range(0, len(size), ROWS_AT_ONCE):
        score = size[first : first + ROWS_AT_ONCE]
        share_of_column = score / sums.columns
        score.div_(sums.rows[first : first + ROWS_AT_ONCE, None]).add_(share_of_column).mul_(
            factors
        )
    return size


def ria_sums(weight: Tensor) -> RiaSums:
    """What RIA divides the magnitudes of a matrix by; one pass over the matrix.

    A row is summed by torch in float32, a column by torch within ``ROWS_AT_ONCE`` rows, and these sums in float64, one after
    the other; so the sums do not depend on how the scores are made of them. On a CPU one thread does it, at the speed of its
    cache: several would wait for each other after every stretch of rows, and on a busy machine for long.
    """
    rows = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    columns = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    at_once = torch.empty(
        (ROWS_AT_ONCE, weight.shape[1]), dtype=torch.float32, device=weight.device
    )
    with _one_thread():
        for first in range(0, len(weight), ROWS_AT_ONCE):
            some = weight[first : first + ROWS_AT_ONCE]
            size = at_once[: len(some)].copy_(some).abs_()
            torch.sum(size, dim=1, out=rows[first : first + ROWS_AT_ONCE])
            columns += size.sum(dim=0)
    rows, columns = (
        torch.where(found == 0, torch.inf, found.to(torch.float32)) for found in (rows, columns)
    )
    return RiaSums(rows, columns)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ria_factors(weight: Tensor, input_square_sum: Tensor, exponent: float = 0.5) -> Tensor:
    """``||X_j||_2 ** exponent`` of RIA's score for each input channel j of ``weight``, float32: see ``ria_score``."""
    return wanda_factors(weight, input_square_sum) ** exponent


def wanda_factors(weight: Tensor, input_square_sum: Tensor) -> Tensor:
    """``||X_j||_2`` of Wanda's score for each input channel j of ``weight``, float32: see ``wanda_score``."""
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
    return input_square_sum.sqrt().to(torch.float32)
