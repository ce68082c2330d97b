"""Slicing of a residual stream: products by hand, principal components by NumPy, properties."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pruning_kernels.groups import slicing
from pruning_kernels.groups.slicing import (
    kept_share,
    normalised,
    packed,
    principal_basis,
    second_moments,
    shortcut,
    sliced_reader,
    sliced_writer,
    unpacked,
)

EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture
def signals() -> Tensor:
    """300 rows of width 12, with directions of very different strength."""
    generator = torch.Generator().manual_seed(3)
    strengths = torch.logspace(1, -1, 12, dtype=torch.float64)
    mixed, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    return torch.randn(300, 12, generator=generator, dtype=torch.float64) * strengths @ mixed


def test_signal_is_divided_by_its_rms() -> None:
    found = normalised(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 0.5)
    torch.testing.assert_close(
        found[0], torch.tensor([3.0, 4.0], dtype=torch.float64) / math.sqrt(13.0), **EXACT
    )
    assert found[1].tolist() == [0.0, 0.0]


def test_second_moments_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are not centred, and rows are processed in several pieces."""
    monkeypatch.setattr(slicing, "ROWS_AT_ONCE", 2)
    found = second_moments(
        torch.tensor([[1.0, 2.0], [0.0, 3.0], [-1.0, 1.0]], dtype=torch.bfloat16)
    )
    assert found.tolist() == [[2.0, 1.0], [1.0, 14.0]]
    assert found.dtype == torch.float64


def test_the_upper_triangle_row_after_row() -> None:
    full = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    assert packed(full).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert torch.equal(unpacked(packed(full), 3), full)


def test_basis_equals_numpy_s_singular_vectors(signals: Tensor) -> None:
    _, _, expected = np.linalg.svd(signals.numpy(), full_matrices=False)
    basis = principal_basis(second_moments(signals), 5)
    along = np.abs(np.sum(basis.numpy() * expected[:5].T, axis=0))
    np.testing.assert_allclose(along, 1.0, atol=1e-10)


def test_a_basis_by_hand() -> None:
    """The strongest direction comes first; the first largest entry of each is positive."""
    basis = principal_basis(torch.tensor([[2.0, -1.0, 0.0], [-1.0, 2.0, 0.0], [0.0, 0.0, 9.0]]), 2)
    half = math.sqrt(0.5)
    torch.testing.assert_close(
        basis[:, 0].abs(), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), **EXACT
    )
    torch.testing.assert_close(
        basis[:, 1].abs(), torch.tensor([half, half, 0.0], dtype=torch.float64), **EXACT
    )
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()
    assert basis[0, 1] * basis[1, 1] < 0


@pytest.mark.parametrize("kept", [1, 7, 12])
def test_basis_is_always_orthonormal(signals: Tensor, kept: int) -> None:
    for moments in (
        second_moments(signals) * 1e-6,
        second_moments(signals[:4]),
        torch.zeros(12, 12),
    ):
        basis = principal_basis(moments, kept)
        torch.testing.assert_close(
            basis.T @ basis, torch.eye(kept, dtype=torch.float64), rtol=0.0, atol=1e-12
        )


def test_what_is_kept_is_what_lies_in_the_basis(signals: Tensor) -> None:
    moments = second_moments(signals)
    basis = principal_basis(moments, 3)
    expected = (signals @ basis).square().sum() / signals.square().sum()
    assert kept_share(moments, basis) == pytest.approx(float(expected), abs=1e-12)
    assert kept_share(moments, principal_basis(moments, 12)) == pytest.approx(1.0)
    assert kept_share(torch.zeros(12, 12), basis) == 1.0


def test_fewer_moments_than_all_keep_no_more(signals: Tensor) -> None:
    """No other three directions hold more of the signals than the principal ones."""
    moments = second_moments(signals)
    most = kept_share(moments, principal_basis(moments, 3))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        other, _ = torch.linalg.qr(torch.randn(12, 3, generator=generator, dtype=torch.float64))
        assert kept_share(moments, other) < most


def test_matrices_that_read_and_write_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicing, "ROWS_AT_ONCE", 1)
    basis = torch.tensor([[0.6], [0.8]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(
        sliced_reader(weight, basis, torch.tensor([2.0, 0.5])),
        torch.tensor([[2.0], [3.2]], dtype=torch.float64),
        **EXACT,
    )
    torch.testing.assert_close(
        sliced_writer(weight, basis), torch.tensor([[3.0, 0.4]], dtype=torch.float64), **EXACT
    )
    torch.testing.assert_close(
        sliced_writer(torch.tensor([1.0, 2.0]), basis),
        torch.tensor([2.2], dtype=torch.float64),
        **EXACT,
    )


def test_a_shortcut_leads_from_basis_to_basis(signals: Tensor) -> None:
    """A shortcut with all directions loses nothing; one with fewer keeps the common part."""
    before = principal_basis(second_moments(signals), 12)
    behind = principal_basis(second_moments(signals[:150]), 12)
    led = (signals @ before) @ shortcut(before, behind).T
    torch.testing.assert_close(led, signals @ behind, rtol=0.0, atol=1e-10)
    narrow = shortcut(before[:, :5], behind[:, :4])
    assert narrow.shape == (4, 5)
    assert torch.linalg.matrix_norm(narrow, 2) <= 1 + 1e-12
