"""Means of low-rank updates against means of dense matrices, and against values by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora.factor_means import (
    KeptFactors,
    PrunedSide,
    coverage_mean,
    weighted_mean,
    zero_padded_mean,
)
from pruning_kernels.lora.factors import Factors

pytestmark = pytest.mark.usefixtures("tests_on_device")


def drawn(rows: int, columns: int, rank: int, scaling: float, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return Factors(
        torch.randn(rows, rank, generator=generator),
        torch.randn(rank, columns, generator=generator),
        scaling,
    )


def dense(factors: Factors) -> np.ndarray:
    return factors.scaling * factors.b.double().numpy() @ factors.a.double().numpy()


def cut(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Return the best approximation of this rank."""
    u, values, vh = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ vh[:rank]


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 4)), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_weighted_mean_equals_dense_updates(
    clients: list[tuple[int, float]], rank: int, seed: int
) -> None:
    """Ranks and scalings differ between clients; the sum of ranks may exceed the smaller side."""
    given_clients = [drawn(10, 8, r, s, seed + i) for i, (r, s) in enumerate(clients)]
    weights = [1.0 + 0.5 * i for i in range(len(clients))]
    mean = sum(w * dense(client) for w, client in zip(weights, given_clients, strict=True)) / sum(
        weights
    )
    found = weighted_mean(given_clients, weights, rank, 2.0)
    assert (found.rank, found.scaling, found.b.dtype) == (rank, 2.0, torch.float32)
    error = np.linalg.norm(dense(found) - mean)
    assert error == pytest.approx(
        np.linalg.norm(cut(mean, rank) - mean), abs=1e-5 * (1 + np.linalg.norm(mean))
    )


@pytest.mark.parametrize("number", [1, 2, 7])
def test_equal_clients_give_what_each_of_them_has(number: int) -> None:
    """The sum of the weights has no effect."""
    client = drawn(9, 12, 3, 2.0, 0)
    for found in (
        weighted_mean([client] * number, [1.0] * number, 3, 0.5),
        weighted_mean([client] * number, [1.0 / number] * number, 4, 2.0),
        zero_padded_mean([client] * number, [5.0] * number, 3),
    ):
        assert dense(found) == pytest.approx(dense(client), abs=1e-5)


def test_mean_of_products_is_no_product_of_means() -> None:
    """The mean of e_1 e_1^T and e_2 e_2^T is half the identity matrix.

    The product of the mean factors has a quarter in every entry.
    """
    one = Factors(column(1.0, 0.0), row(1.0, 0.0), 1.0)
    other = Factors(column(0.0, 1.0), row(0.0, 1.0), 1.0)
    assert dense(weighted_mean([one, other], [1, 1], 2, 1.0)) == pytest.approx(np.diag([0.5, 0.5]))
    assert dense(zero_padded_mean([one, other], [1, 1], 1)) == pytest.approx(np.full((2, 2), 0.25))


def test_coverage_of_rows_on_paper(device: torch.device) -> None:
    """Four rows: device 0 keeps 0 and 1, device 1 keeps 1 and 2, and no device keeps 3.

    The weights are 1 and 3, the scalings 2 and 1. Row 0 is that of device 0, 2 * 1 * (1, 2). Row 1
    is 1/4 of 2 * 2 * (1, 2) plus 3/4 of 4 * (1, 0). Row 2 is that of device 1, 8 * (1, 0).
    """
    first = Factors(column(1.0, 2.0).to(device), row(1.0, 2.0).to(device), 2.0)
    second = Factors(column(4.0, 8.0).to(device), row(1.0, 0.0).to(device), 1.0)
    maps = torch.tensor([[True, True, False, False], [False, True, True, False]], device=device)
    clients = [KeptFactors(first, maps[0]), KeptFactors(second, maps[1])]
    found = coverage_mean(clients, [1, 3], "rows", 2, 4.0)
    mean = Factors(found.b.cpu(), found.a.cpu(), found.scaling)
    assert dense(mean) == pytest.approx(
        np.array([[2.0, 4.0], [4.0, 2.0], [8.0, 0.0], [0.0, 0.0]]), abs=1e-5
    )
    assert found.b[3].tolist() == [0.0, 0.0]
    diluted = coverage_mean(clients, [1, 3], "rows", 2, 4.0, divisor="all")
    expected = np.array([[0.5, 1.0], [4.0, 2.0], [6.0, 0.0], [0.0, 0.0]])
    assert dense(Factors(diluted.b.cpu(), diluted.a.cpu(), 4.0)) == pytest.approx(
        expected, abs=1e-5
    )


def test_coverage_of_columns_on_paper() -> None:
    """The same as for rows, transposed."""
    first = KeptFactors(
        Factors(column(1.0, 2.0), row(1.0, 2.0), 2.0), torch.tensor([True, True, False, False])
    )
    second = KeptFactors(
        Factors(column(1.0, 0.0), row(4.0, 8.0), 1.0), torch.tensor([False, True, True, False])
    )
    found = coverage_mean([first, second], [1, 3], "columns", 2, 4.0)
    assert dense(found) == pytest.approx(
        np.array([[2.0, 4.0, 8.0, 0.0], [4.0, 2.0, 0.0, 0.0]]), abs=1e-5
    )
    assert found.a[:, 3].tolist() == [0.0, 0.0]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["rows", "columns"]), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_coverage_against_a_slow_loop(side: PrunedSide, number: int, seed: int) -> None:
    """The loop adds the rows of dense updates; the rank is high enough for an exact mean.

    The sums of ranks lie below and above the smaller side.
    """
    generator = np.random.default_rng(seed)
    sides = (12, 7) if side == "rows" else (7, 12)
    clients = []
    weights = generator.integers(1, 9, number).astype(float).tolist()
    total = np.zeros((12, 7))
    coverage = np.zeros(12)
    for index in range(number):
        keep = generator.random(12) < 0.6
        keep[generator.integers(12)] = True
        kept = (int(keep.sum()), 7) if side == "rows" else (7, int(keep.sum()))
        factors = drawn(
            *kept, int(generator.integers(1, 4)), float(generator.uniform(0.5, 2)), index
        )
        clients.append(KeptFactors(factors, torch.tensor(keep)))
        lines = iter(dense(factors) if side == "rows" else dense(factors).T)
        for place in np.flatnonzero(keep):
            total[place] += weights[index] * next(lines)
            coverage[place] += weights[index]
    expected = total / np.where(coverage, coverage, 1)[:, None]
    found = coverage_mean(clients, weights, side, 7, 1.5)
    assert found.shape == sides
    assert dense(found) == pytest.approx(expected if side == "rows" else expected.T, abs=1e-4)
    alone = coverage_mean(clients[:1], [1.0], side, 7, 1.5)
    unseen = ~clients[0].keep
    assert not (alone.b[unseen] if side == "rows" else alone.a[:, unseen]).any()


def test_a_device_without_weight_covers_nothing() -> None:
    kept = KeptFactors(Factors(column(1.0), row(1.0, 1.0), 1.0), torch.tensor([True, False]))
    ignored = KeptFactors(Factors(column(5.0), row(1.0, 1.0), 1.0), torch.tensor([False, True]))
    found = coverage_mean([kept, ignored], [1, 0], "rows", 1, 1.0)
    assert dense(found) == pytest.approx(np.array([[1.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_rows_nobody_kept_keep_absent_values(side: PrunedSide) -> None:
    """Devices keep rows 0 and 1 of four, absent devices keep 1 and 2, and nobody keeps 3.

    Row 1 is that of the devices that take part.
    """
    devices = KeptFactors(
        Factors(column(1.0, 2.0), row(1.0, 2.0), 2.0), torch.tensor([True, True, False, False])
    )
    absent = KeptFactors(
        Factors(column(9.0, 5.0), row(0.0, 3.0), 1.0), torch.tensor([False, True, True, False])
    )
    if side == "columns":
        devices, absent = (
            KeptFactors(Factors(k.factors.a.T, k.factors.b.T, k.factors.scaling), k.keep)
            for k in (devices, absent)
        )
    expected = np.array([[2.0, 4.0], [4.0, 8.0], [0.0, 15.0], [0.0, 0.0]])
    found = dense(coverage_mean([devices], [3], side, 2, 4.0, last=absent))
    assert (found if side == "rows" else found.T) == pytest.approx(expected, abs=1e-5)
    assert not (found if side == "rows" else found.T)[3].any()


def test_full_coverage_ignores_last_update() -> None:
    kept = KeptFactors(drawn(3, 5, 2, 1.0, 0), torch.tensor([True, True, False, True]))
    last = KeptFactors(drawn(2, 5, 2, 1.0, 1), torch.tensor([True, False, False, True]))
    plain = coverage_mean([kept], [1], "rows", 2, 1.0)
    found = coverage_mean([kept], [1], "rows", 2, 1.0, last=last)
    assert torch.equal(plain.b, found.b)
    assert torch.equal(plain.a, found.a)


def test_everything_kept_is_the_weighted_mean() -> None:
    clients = [drawn(8, 9, 2, 1.0, seed) for seed in range(3)]
    found = coverage_mean(
        [KeptFactors(client, torch.ones(8, dtype=torch.bool)) for client in clients],
        [1, 2, 3],
        "rows",
        6,
        1.0,
    )
    expected = (dense(clients[0]) + 2 * dense(clients[1]) + 3 * dense(clients[2])) / 6
    assert dense(found) == pytest.approx(expected, abs=1e-5)


def test_zero_padding_on_paper(device: torch.device) -> None:
    """Ranks 1 and 2 with weights 1 and 3.

    The second column of B is 3/4 of the second client's.
    """
    one = Factors(column(4.0, 8.0).to(device), row(4.0, 0.0).to(device), 2.0)
    two = Factors(
        torch.tensor([[0.0, 4.0], [4.0, 8.0]], device=device),
        torch.tensor([[8.0, 4.0], [4.0, 0.0]], device=device),
        2.0,
    )
    found = zero_padded_mean([one, two], [1, 3], 3)
    assert found.b.tolist() == [[1.0, 3.0, 0.0], [5.0, 6.0, 0.0]]
    assert found.a.tolist() == [[7.0, 3.0], [3.0, 0.0], [0.0, 0.0]]
    assert (found.scaling, found.b.dtype) == (2.0, torch.float32)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    clients = [drawn(3, 3, 2, 1.0, seed) for seed in range(2)]
    keep = torch.ones(3, dtype=torch.bool)
    for mean in (
        lambda: weighted_mean(clients, weights, 2, 1.0),
        lambda: zero_padded_mean(clients, weights, 2),
        lambda: coverage_mean(
            [KeptFactors(client, keep) for client in clients], weights, "rows", 2, 1.0
        ),
    ):
        with pytest.raises(ValueError, match="finite and at least 0, and not all of them 0"):
            mean()


def test_weights_whose_sum_is_beyond_float64() -> None:
    one = Factors(column(1.0), row(2.0), 1.0)
    other = Factors(column(1.0), row(4.0), 1.0)
    assert zero_padded_mean([one, other], [1.5e308, 1.5e308], 1).a.tolist() == [[3.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    client = Factors(column(1.0, bad), row(1.0, 1.0), 1.0)
    keep = torch.tensor([True, True])
    for mean in (
        lambda: weighted_mean([client], [1], 1, 1.0),
        lambda: zero_padded_mean([client], [1], 1),
        lambda: coverage_mean([KeptFactors(client, keep)], [1], "rows", 1, 1.0),
    ):
        with pytest.raises(ValueError, match="NaN or infinity"):
            mean()
