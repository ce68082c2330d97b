"""Scores against values computed by hand."""

import math

import pytest
import torch

from pruning_kernels.selection.scores import magnitude_score, wanda_score


def test_magnitude_is_the_absolute_value_in_float32(device: torch.device) -> None:
    weight = torch.tensor([[-1.5, 0.25], [2.0, -0.0]], dtype=torch.bfloat16, device=device)
    scores = magnitude_score(weight)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[1.5, 0.25], [2.0, 0.0]]


def test_wanda_on_paper(device: torch.device) -> None:
    """Input norms are sqrt(9) = 3, sqrt(16) = 4 and sqrt(0.25) = 0.5."""
    weight = torch.tensor([[1.0, -2.0, 4.0], [-3.0, 0.5, -6.0]], device=device)
    scores = wanda_score(weight, torch.tensor([9.0, 16.0, 0.25], device=device))
    assert scores.tolist() == [[3.0, 8.0, 2.0], [9.0, 2.0, 3.0]]


def test_wanda_takes_the_norm_from_the_inputs_square_sum(device: torch.device) -> None:
    """Three tokens with two channels: the squares sum to 1 + 4 + 9 = 14 and 4 + 0 + 36 = 40."""
    inputs = torch.tensor([[1.0, 2.0], [-2.0, 0.0], [3.0, -6.0]], device=device)
    scores = wanda_score(torch.tensor([[2.0, 1.0]], device=device), inputs.square().sum(dim=0))
    assert scores.tolist() == [pytest.approx([2 * math.sqrt(14), math.sqrt(40)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wanda_scores_are_float32_whatever_the_weights_are(
    device: torch.device, dtype: torch.dtype
) -> None:
    scores = wanda_score(
        torch.ones(2, 3, dtype=dtype, device=device),
        torch.ones(3, dtype=torch.float64, device=device),
    )
    assert scores.dtype == torch.float32


def test_a_channel_that_never_fires_scores_zero(device: torch.device) -> None:
    scores = wanda_score(
        torch.tensor([[5.0, 5.0]], device=device), torch.tensor([0.0, 1.0], device=device)
    )
    assert scores.tolist() == [[0.0, 5.0]]


@pytest.mark.parametrize("norms", [torch.ones(2), torch.ones(4), torch.ones(1, 3)])
def test_wanda_refuses_norms_of_another_shape(device: torch.device, norms: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="needs 3 input norms"):
        wanda_score(torch.ones(2, 3, device=device), norms.to(device))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_wanda_refuses_activations_that_are_not_finite(device: torch.device, bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        wanda_score(torch.ones(1, 2, device=device), torch.tensor([1.0, bad], device=device))


def test_a_square_sum_beyond_float32_still_has_a_finite_norm(device: torch.device) -> None:
    """Sums are float64: 1e40 exceeds float32, but its root 1e20 does not."""
    square_sum = torch.tensor([1e40], dtype=torch.float64, device=device)
    assert wanda_score(torch.tensor([[2.0]], device=device), square_sum).tolist() == [
        [pytest.approx(2e20)]
    ]
