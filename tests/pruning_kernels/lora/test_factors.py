"""Products of thin factors against the dense matrix, its SVD, and values by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora.factors import Factors, norm, refactorise, singular_values

pytestmark = pytest.mark.usefixtures("tests_on_device")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(factors: Factors, rank: int | None = None) -> np.ndarray:
    """Return scaling * B @ A of the first ranks, in NumPy."""
    b = factors.b.double().numpy()[:, :rank]
    a = factors.a.double().numpy()[:rank]
    return factors.scaling * b @ a


def test_on_paper(device: torch.device) -> None:
    """The only singular value of 2 * [[1], [2]] @ [[3, 4]] is 2 * sqrt(5) * 5."""
    factors = Factors(
        torch.tensor([[1.0], [2.0]], device=device), torch.tensor([[3.0, 4.0]], device=device), 2.0
    )
    assert (factors.rank, factors.shape) == (1, (2, 2))
    assert norm(factors) == pytest.approx(10 * math.sqrt(5))
    assert singular_values(factors).tolist() == pytest.approx([10 * math.sqrt(5)])


def test_a_diagonal_product_on_paper(device: torch.device) -> None:
    """diag(1, -9, 4) with scaling 4: columns are ordered by size 9, 4, 1.

    B and A share the square roots of 9/4, 1 and 1/4; the entries of B are positive.
    """
    found = refactorise(
        torch.diag(torch.tensor([1.0, -9.0, 4.0])).to(device), torch.eye(3, device=device), 3, 4.0
    )
    assert found.b.tolist() == [
        pytest.approx(row) for row in [[0, 0, 0.5], [1.5, 0, 0], [0, 1.0, 0]]
    ]
    assert found.a.tolist() == [
        pytest.approx(row) for row in [[0, -1.5, 0], [0, 0, 1.0], [0.5, 0, 0]]
    ]
    assert found.scaling == 4.0


@settings(max_examples=25, deadline=None)
@given(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), st.integers(0, 1000))
def test_norm_and_singular_values_equal_dense(sizes: tuple[int, int, int], seed: int) -> None:
    """Covers ranks above the number of rows or columns."""
    rows, columns, rank = sizes
    factors = Factors(drawn(rows, rank, seed=seed), drawn(rank, columns, seed=seed + 1), 0.5)
    expected = np.linalg.svd(dense(factors), compute_uv=False)[:rank]
    assert norm(factors) == pytest.approx(math.sqrt((expected**2).sum()), rel=1e-6, abs=1e-6)
    found = singular_values(factors)
    assert (found.dtype, found.shape) == (torch.float32, (rank,))
    assert found.tolist() == pytest.approx(
        [*expected, *[0.0] * (rank - len(expected))], rel=1e-5, abs=1e-6
    )


SHAPES = [
    (40, 30, 6),
    (30, 40, 6),
    (24, 24, 23),
    (20, 50, 20),
    (50, 20, 33),
    (1, 7, 3),
    (7, 1, 1),
    (5, 5, 1),
]


@pytest.mark.parametrize(("rows", "columns", "k"), SHAPES)
def test_error_equals_eckart_young(rows: int, columns: int, k: int, device: torch.device) -> None:
    """k lies below, at and above the smaller side, and so does the rank."""
    left = drawn(rows, k, seed=1)
    right = drawn(k, columns, seed=2)
    whole = left.double() @ right.double()
    values = torch.linalg.svd(whole).S.numpy()
    highest = min(rows, columns, k) + 2
    found = refactorise(left.to(device), right.to(device), highest, 0.25)
    assert (found.b.dtype, found.a.dtype, found.rank) == (torch.float32, torch.float32, highest)
    found = Factors(found.b.cpu(), found.a.cpu(), found.scaling)
    for rank in range(1, highest + 1):
        error = np.linalg.norm(dense(found, rank) - whole.numpy())
        assert error == pytest.approx(
            math.sqrt((values[rank:] ** 2).sum()), abs=1e-5 * float(values[0])
        )
    assert dense(refactorise(left, right, 2, 0.25)) == pytest.approx(
        dense(found, 2), abs=1e-5 * float(values[0])
    )


@pytest.mark.parametrize("k", [4, 12])
def test_columns_are_ordered_balanced_orthogonal(k: int) -> None:
    found = refactorise(drawn(12, k, seed=3), drawn(k, 15, seed=4), 4, 2.0)
    b = found.b.double().numpy()
    a = found.a.double().numpy()
    squares = np.diag(b.T @ b)
    assert b.T @ b == pytest.approx(np.diag(squares), abs=1e-5)
    assert a @ a.T == pytest.approx(np.diag(squares), abs=1e-5)
    assert list(squares) == sorted(squares, reverse=True)
    assert all(column[np.abs(column).argmax()] > 0 for column in b.T)


@pytest.mark.parametrize("k", [5, 40])
def test_the_factors_depend_on_the_product_alone(k: int) -> None:
    """Another basis between left and right and other signs; k = 40 uses the dense product."""
    left = drawn(20, 5, seed=5).double()
    right = drawn(5, 30, seed=6).double()
    basis = drawn(5, k, seed=7).double()
    expected = refactorise(left, right, 5, 1.0)
    found = refactorise(-left @ basis, -torch.linalg.pinv(basis) @ right, 5, 1.0)
    torch.testing.assert_close(found.b, expected.b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.a, expected.a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [6, 20])
def test_ranks_above_the_products_own_are_zero(k: int) -> None:
    """Three directions that repeat, and a product that cancels."""
    left = drawn(20, 3, seed=8)
    right = drawn(3, 15, seed=9)
    copies = torch.arange(k) % 3
    found = refactorise(left[:, copies], right[copies], 5, 1.0)
    assert [bool(column.any()) for column in found.b.T] == [True] * 3 + [False] * 2
    assert [bool(row.any()) for row in found.a] == [True] * 3 + [False] * 2
    cancelled = refactorise(torch.cat([left, -left], dim=1), torch.cat([right, right]), 2, 1.0)
    assert not cancelled.b.any()
    assert not cancelled.a.any()


def test_the_same_inputs_give_the_same_bits() -> None:
    results = [
        refactorise(drawn(50, 20, seed=10), drawn(20, 60, seed=11), 8, 2.0) for _ in range(2)
    ]
    assert torch.equal(results[0].b, results[1].b)
    assert torch.equal(results[0].a, results[1].a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_come_out_in_float32(dtype: torch.dtype) -> None:
    factors = Factors(drawn(4, 2).to(dtype), drawn(2, 3).to(dtype), 1.0)
    for found in (singular_values(factors), refactorise(factors.b, factors.a, 2, 1.0).a):
        assert found.dtype == torch.float32


def test_gradients_of_parameters_are_detached() -> None:
    factors = Factors(torch.nn.Parameter(drawn(4, 2)), torch.nn.Parameter(drawn(2, 3)), 1.0)
    assert not singular_values(factors).requires_grad
    assert not refactorise(factors.b, factors.a, 2, 1.0).b.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    factors = Factors(torch.tensor([[1.0], [bad]]), torch.ones(1, 2), 1.0)
    for ask in (norm, singular_values):
        with pytest.raises(ValueError, match="NaN or infinity"):
            ask(factors)
    with pytest.raises(ValueError, match="NaN or infinity"):
        refactorise(factors.b, factors.a, 1, 1.0)


def test_an_update_beyond_float32_is_refused() -> None:
    """3e38 * 3e38 exceeds float32 but not float64."""
    factors = Factors(torch.full((1, 1), 3e38), torch.full((1, 1), 3e38), 1.0)
    assert norm(factors) == pytest.approx(9e76)
    with pytest.raises(ValueError, match="NaN or infinity"):
        singular_values(factors)
    with pytest.raises(ValueError, match="NaN or infinity"):
        norm(Factors(torch.full((1, 1), 1e200, dtype=torch.float64), torch.ones(1, 1), 1.0))
