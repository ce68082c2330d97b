"""The running variance of FLAP's code, computed by hand; it depends on the order of samples."""

import pytest
import torch

from benchmarks.accuracy.flap_variance import running_figure, running_moments
from pruning_kernels.groups.fluctuation import moments_of


def test_running_figure_depends_on_window_order() -> None:
    """Samples of one token: 1, 2, 6 has the means 1, 1.5, 3; 6, 2, 1 has the means 6, 4, 3.

    The first sample adds nothing.
    """
    samples = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)[:, None, None]
    assert float(running_figure(samples)) == pytest.approx(0.5**2 / 2 / 2 + 3**2 / 3)
    assert float(running_figure(samples.flip(0))) == pytest.approx(2**2 / 2 / 2 + 2**2 / 3)
    assert float(moments_of(samples.flatten(0, 1)).variance) == pytest.approx(7.0)


def test_it_is_a_sum_over_the_tokens_of_a_window() -> None:
    samples = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    twice = samples.expand(4, 2, 3)
    torch.testing.assert_close(running_figure(twice), 2 * running_figure(samples))
    torch.testing.assert_close(running_moments(twice).variance, running_moments(samples).variance)
