"""Means of each rank over its holders, and the energy of ranks."""

import pytest
import torch

from pruning_kernels.lora.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.rank_means import holder_mean, holder_update_mean, rank_energy
from tests.pruning_kernels.lora.test_exact_means import SCALING, dense, drawn


def test_each_rank_is_averaged_over_its_holders() -> None:
    clients = [drawn(0, 1), drawn(1, 2), drawn(2, 2)]
    weights = [1.0, 2.0, 6.0]
    before = drawn(9, 3)
    found = holder_mean(clients, [1, 2, 2], weights, before)
    first = (clients[0].b[:, 0] + 2 * clients[1].b[:, 0] + 6 * clients[2].b[:, 0]) / 9
    second = (2 * clients[1].a[1] + 6 * clients[2].a[1]) / 8
    torch.testing.assert_close(found.b[:, 0], first)
    torch.testing.assert_close(found.a[1], second)
    # No client has the third rank.
    assert torch.equal(found.b[:, 2], before.b[:, 2])
    assert torch.equal(found.a[2], before.a[2])


def test_a_given_up_rank_has_no_weight() -> None:
    """A client that prunes itself sends zeros in the shape of its old rank."""
    clients = [drawn(0, 2), drawn(1, 2)]
    clients[1].b[:, 1] = 0
    clients[1].a[1] = 0
    found = holder_mean(clients, [2, 1], [1.0, 1.0], drawn(9, 2))
    assert torch.equal(found.b[:, 1], clients[0].b[:, 1])
    diluted = zero_padded_mean(clients, [1.0, 1.0], 2)
    torch.testing.assert_close(diluted.b[:, 1], clients[0].b[:, 1] / 2)


def test_updates_are_averaged_by_rank() -> None:
    clients = [drawn(0, 1), drawn(1, 3)]
    weights = [3.0, 1.0]
    expected = torch.zeros(6, 7, dtype=torch.float64)
    for rank in range(3):
        holders = [(c, w) for c, w in zip(clients, weights, strict=True) if c.rank > rank]
        for client, weight in holders:
            product = torch.outer(client.b[:, rank].double(), client.a[rank].double())
            expected += SCALING * weight * product / sum(w for _, w in holders)
    found = holder_update_mean(clients, [1, 3], weights, drawn(9, 3))
    u, values, vh = torch.linalg.svd(expected, full_matrices=False)
    best = (u[:, :3] * values[:3]) @ vh[:3]
    torch.testing.assert_close(dense(found), best, rtol=0, atol=1e-5)


def test_what_a_limit_takes_goes_to_the_values_before() -> None:
    clients = [drawn(0, 1), drawn(1, 1), drawn(2, 2)]
    ranks, weights, before = [1, 1, 2], [3.0, 1.0, 1.0], drawn(9, 2)
    found = holder_mean(clients, ranks, weights, before, max_share=0.5)
    firsts = [0.5 * clients[0].b, 0.2 * clients[1].b, 0.2 * clients[2].b[:, :1]]
    torch.testing.assert_close(found.b[:, :1], sum(firsts) + 0.1 * before.b[:, :1])
    torch.testing.assert_close(found.a[1], (clients[2].a[1] + before.a[1]) / 2)
    updates = holder_update_mean(clients, ranks, weights, before, max_share=0.5)
    parts = [(clients[0], 0, 0.5), (clients[1], 0, 0.2), (clients[2], 0, 0.2), (before, 0, 0.1)]
    expected = torch.zeros(6, 7, dtype=torch.float64)
    for factors, rank, share in [*parts, (clients[2], 1, 0.5), (before, 1, 0.5)]:
        product = torch.outer(factors.b[:, rank].double(), factors.a[rank].double())
        expected += SCALING * share * product
    u, values, vh = torch.linalg.svd(expected, full_matrices=False)
    torch.testing.assert_close(dense(updates), (u[:, :2] * values[:2]) @ vh[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("of_updates", [False, True])
def test_clients_of_one_rank_have_the_usual_mean(of_updates: bool) -> None:
    clients = [drawn(seed, 2) for seed in range(3)]
    weights = [1.0, 2.0, 3.0]
    mean, usual = (
        (holder_update_mean, weighted_mean(clients, weights, 2, SCALING))
        if of_updates
        else (holder_mean, zero_padded_mean(clients, weights, 2))
    )
    found = mean(clients, [2, 2, 2], weights, drawn(9, 2))
    torch.testing.assert_close(dense(found), dense(usual), rtol=0, atol=1e-5)


def test_clients_of_weight_zero_hold_nothing() -> None:
    before = drawn(9, 2)
    found = holder_mean([drawn(0, 2), drawn(1, 1)], [2, 1], [0.0, 1.0], before)
    assert torch.equal(found.b[:, 1], before.b[:, 1])


def test_energy_is_that_of_the_dense_updates() -> None:
    updates = [drawn(0, 3), drawn(1, 3)]
    expected = sum(torch.linalg.svdvals(dense(update))[:3] ** 2 for update in updates)
    torch.testing.assert_close(rank_energy(updates), expected, rtol=1e-4, atol=1e-6)
    nothing = Factors(torch.zeros(4, 2), torch.ones(2, 4), 1.0)
    assert not rank_energy([nothing]).any()
