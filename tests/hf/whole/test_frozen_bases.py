"""Frozen factors of Fed-SB: singular vectors by NumPy, and matrices of a lower rank."""

import numpy as np
import pytest
import torch
from torch import Tensor

from espalier.hf.whole.frozen_bases import singular_vectors

NARROW = {"rtol": 0.0, "atol": 1e-6}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def found(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return singular_vectors(weight, rank, np.random.default_rng(5))


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
def test_vectors_are_those_that_numpy_finds(shape: tuple[int, int]) -> None:
    weight = drawn(*shape) * torch.logspace(0, -3, shape[1], dtype=torch.float64)
    b, a = found(weight, 4)
    u, values, vh = np.linalg.svd(weight.numpy())
    largest = u[np.abs(u[:, :4]).argmax(axis=0), range(4)]
    torch.testing.assert_close(
        b.numpy(), (u[:, :4] * np.sign(largest)).astype(np.float32), **NARROW
    )
    # One sign for both vectors: their products are the matrix.
    torch.testing.assert_close(
        b.double() @ torch.from_numpy(values[:4]).diag() @ a.double(),
        torch.from_numpy((u[:, :4] * values[:4]) @ vh[:4]),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("rank_of_matrix", [0, 1, 3])
@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (40, 40)])
def test_other_last_bits_change_vectors_as_little(
    shape: tuple[int, int], rank_of_matrix: int
) -> None:
    """A matrix of a lower rank gets random vectors, which do not depend on rounding errors."""
    weight = drawn(shape[0], rank_of_matrix) @ drawn(rank_of_matrix, shape[1], seed=1)
    b, a = found(weight, 6)
    torch.testing.assert_close(b.T @ b, torch.eye(6), **NARROW)
    torch.testing.assert_close(a @ a.T, torch.eye(6), **NARROW)
    noise = 1 + 1e-15 * drawn(*shape, seed=2)
    other_b, other_a = found(weight * noise, 6)
    torch.testing.assert_close(other_b, b, **NARROW)
    torch.testing.assert_close(other_a, a, **NARROW)
