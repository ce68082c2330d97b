"""How much a weight matters to one client: the score by which local pruning ranks weights."""

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Rows whose RIA scores are made together: what is known of them stays in the second cache."""


class NotFiniteError(ValueError):
    """NaN or infinity where numbers are to be compared; the text holds no number of them."""


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
    size = magnitude_score(weight)
    norms = wanda_factors(weight, input_square_sum)
    columns, rows = size.sum(dim=0, keepdim=True), size.sum(dim=1, keepdim=True)
    columns, rows = (torch.where(sums == 0, torch.inf, sums) for sums in (columns, rows))
    strength = norms**exponent
    for first in range(0, len(size), ROWS_AT_ONCE):  # in place, so that no second matrix is written and read
        score = size[first : first + ROWS_AT_ONCE]
        share_of_column = score / columns
        score.div_(rows[first : first + ROWS_AT_ONCE]).add_(share_of_column).mul_(strength)
    return size


def wanda_factors(weight: Tensor, input_square_sum: Tensor) -> Tensor:
    """``||X_j||_2`` of Wanda's score for each input channel j of ``weight``, float32: see ``wanda_score``."""
    if input_square_sum.shape != weight.shape[1:]:
        raise ValueError(
            f"weight {tuple(weight.shape)} needs {weight.shape[1]} input norms, got {tuple(input_square_sum.shape)}"
        )
    if not bool(torch.isfinite(input_square_sum).all()):
        raise NotFiniteError("the calibration activations contain NaN or infinity; use dtype float32 or check the model")
    return input_square_sum.sqrt().to(torch.float32)
