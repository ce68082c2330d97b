"""Exact means of LoRA updates, compared with dense products."""

import numpy as np
import pytest
import torch

from pruning_kernels.lora.exact_means import residual_of_means, stacked_update, with_update
from pruning_kernels.lora.factor_means import zero_padded_mean
from pruning_kernels.lora.factors import Factors
from pruning_kernels.selection.scores import NotFiniteError

SCALING = 1.5


def drawn(seed: int, rank: int, out: int = 6, features: int = 7) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return Factors(
        torch.randn(out, rank, generator=generator),
        torch.randn(rank, features, generator=generator),
        SCALING,
    )


def dense(factors: Factors) -> torch.Tensor:
    return factors.scaling * factors.b.double() @ factors.a.double()


def dense_mean(clients: list[Factors], weights: list[float]) -> torch.Tensor:
    total = torch.zeros(clients[0].shape, dtype=torch.float64)
    for client, weight in zip(clients, weights, strict=True):
        total += weight * dense(client)
    return total / sum(weights)


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [2.0, 0.0, 5.0, 0.5]])
def test_mean_and_residual_are_the_dense_mean(weights: list[float]) -> None:
    clients = [drawn(seed, 2) for seed in range(len(weights))]
    residual = residual_of_means(clients, weights)
    assert residual.rank == 2 * (len(weights) - 1)
    found = dense(zero_padded_mean(clients, weights, 2)) + dense(residual)
    torch.testing.assert_close(found, dense_mean(clients, weights), rtol=0, atol=1e-5)


def test_residual_of_equal_clients_is_zero() -> None:
    assert not dense(residual_of_means([drawn(1, 2)] * 3, [1.0, 2.0, 3.0])).any()


def test_stacked_ranks_are_the_dense_mean() -> None:
    clients = [drawn(seed, rank) for seed, rank in enumerate((1, 3, 2))]
    weights = [1.0, 2.0, 4.0]
    stacked = stacked_update(clients, weights)
    assert stacked.rank == 6
    torch.testing.assert_close(dense(stacked), dense_mean(clients, weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "rank"), [(0, 0, 2), (0, 2, 3), (2, 2, 4), (5, 4, 6), (6, 6, 6)]
)
def test_a_sum_of_any_rank_is_exact(first: int, second: int, rank: int) -> None:
    """Six is the smaller side; beyond it the sum is factorised again."""
    one, other = drawn(3, first), drawn(4, second)
    total = with_update(one, other, rank)
    assert total.b.shape == (6, rank)
    assert total.a.shape == (rank, 7)
    torch.testing.assert_close(dense(total), dense(one) + dense(other), rtol=0, atol=1e-5)


def test_a_sum_does_not_show_its_terms() -> None:
    """No column is one of those that were added, up to its length."""
    one, other = drawn(3, 2), drawn(4, 2)
    total = with_update(one, other, 4)
    added = torch.nn.functional.normalize(torch.cat([one.b, other.b], dim=1), dim=0)
    found = torch.nn.functional.normalize(total.b, dim=0)
    assert (added.T @ found).abs().max() < 0.999


def test_numbers_that_are_none_are_refused() -> None:
    bad = drawn(1, 2)
    bad.b[0, 0] = np.nan
    with pytest.raises(NotFiniteError):
        stacked_update([drawn(0, 2), bad], [1.0, 1.0])
    with pytest.raises(ValueError, match="not all of them 0"):
        residual_of_means([drawn(0, 2)], [0.0])
