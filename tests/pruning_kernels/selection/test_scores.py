"""Norms of input channels against values computed by hand."""

import math

import pytest
import torch

from pruning_kernels.selection.scores import wanda_factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_are_float32_for_any_weights(device: torch.device, dtype: torch.dtype) -> None:
    """Three tokens with two channels: the squares sum to 1 + 4 + 9 = 14 and 4 + 0 + 36 = 40."""
    inputs = torch.tensor([[1.0, 2.0], [-2.0, 0.0], [3.0, -6.0]], device=device)
    norms = wanda_factors(
        torch.ones(1, 2, dtype=dtype, device=device), inputs.square().sum(dim=0).double()
    )
    assert norms.dtype == torch.float32
    assert norms.tolist() == pytest.approx([math.sqrt(14), math.sqrt(40)])


@pytest.mark.parametrize("sums", [torch.ones(2), torch.ones(4), torch.ones(1, 3)])
def test_sums_of_another_shape_are_refused(device: torch.device, sums: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="needs 3 input norms"):
        wanda_factors(torch.ones(2, 3, device=device), sums.to(device))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_activations_are_refused(device: torch.device, bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        wanda_factors(torch.ones(1, 2, device=device), torch.tensor([1.0, bad], device=device))


def test_square_sum_beyond_float32_has_a_norm(device: torch.device) -> None:
    """Sums are float64: 1e40 exceeds float32, but its root 1e20 does not."""
    square_sum = torch.tensor([1e40], dtype=torch.float64, device=device)
    norms = wanda_factors(torch.ones(1, 1, device=device), square_sum)
    assert norms.tolist() == [pytest.approx(1e20)]
