"""FLAP's scores against loops, and pooled moments against those of all inputs together."""

import statistics

import pytest
import torch

from pruning_kernels.groups.fluctuation import (
    channel_scores,
    moments_of,
    pooled,
    standardised,
)


def inputs(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, 5, generator=generator) * torch.tensor([1.0, 3.0, 0.01, 1e-6, 1.0])
        + seed
    )


def test_pooled_moments_are_those_of_all_inputs() -> None:
    parts = [inputs(tokens, seed) for seed, tokens in enumerate((7, 1, 300, 12))]
    found = pooled([moments_of(part) for part in parts])
    whole = torch.cat(parts).double()
    assert found.count == 320
    torch.testing.assert_close(found.mean, whole.mean(dim=0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.variance, whole.var(dim=0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.square_sum, whole.square().sum(dim=0), rtol=1e-12, atol=0)


def test_scores_equal_loops() -> None:
    values = inputs(40, 2)
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(9))
    expected = []
    for channel in range(5):
        column = [float(weight[row, channel]) for row in range(3)]
        tokens = [float(value) for value in values[:, channel]]
        expected.append(statistics.variance(tokens) * sum(value**2 for value in column))
    assert channel_scores(moments_of(values), weight).tolist() == pytest.approx(expected, rel=1e-6)


def test_one_token_does_not_fluctuate() -> None:
    assert moments_of(inputs(1, 1)).variance.tolist() == [0.0] * 5


def test_standardised_by_hand() -> None:
    assert standardised(torch.tensor([1.0, 2.0, 3.0])).tolist() == [-1.0, 0.0, 1.0]
    assert standardised(torch.tensor([4.0, 4.0])).tolist() == [0.0, 0.0]
