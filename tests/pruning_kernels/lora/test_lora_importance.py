"""Importance from LoRA gradients against dense matrices and loops over single weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora import importance
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.importance import (
    Gradients,
    Score,
    combined,
    group_importance,
    moving_average,
)

pytestmark = pytest.mark.usefixtures("tests_on_device")


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adapter(
    rows: int, columns: int, rank: int, seed: int = 0
) -> tuple[torch.Tensor, Factors, Gradients]:
    weight, b, a, gradient_b, gradient_a = (
        drawn(*shape, seed=seed + place)
        for place, shape in enumerate(
            [(rows, columns), (rows, rank), (rank, columns), (rows, rank), (rank, columns)]
        )
    )
    return weight, Factors(b, a, 1.5), Gradients(gradient_b, gradient_a)


def expected(
    weight: torch.Tensor, factors: Factors, gradients: Gradients, side: int, size: int, score: Score
) -> list[float]:
    """Return the importance weight by weight, as in equation 10, with the scaling s."""
    b = factors.b.numpy()
    a = factors.a.numpy()
    gradient_b = gradients.b.numpy()
    gradient_a = gradients.a.numpy()
    units = [0.0] * (weight.shape[side] // size)
    for m in range(weight.shape[0]):
        for n in range(weight.shape[1]):
            estimate = (
                gradient_b[m] @ a[:, n] + b[m] @ gradient_a[:, n] - gradient_b[m] @ gradient_a[:, n]
            )
            product = estimate * (float(weight[m, n]) + factors.scaling * (b[m] @ a[:, n]))
            units[(m, n)[side] // size] += product**2 if score == "exact" else product
    return units if score == "exact" else [unit**2 for unit in units]


def test_on_paper(device: torch.device) -> None:
    """G = gB A + B gA - gB gA = diag(1, 2).

    The terms are [[0, 0], [1, 2]], [[1, 0], [0, 0]] and [[0, 0], [1, 0]]. With s = 2 and W of ones,
    M = [[3, 5], [1, 1]], so the products are diag(3, 2).
    """
    one = torch.ones(2, 2, device=device)
    factors = Factors(
        torch.tensor([[1.0], [0.0]], device=device), torch.tensor([[1.0, 2.0]], device=device), 2.0
    )
    gradients = Gradients(
        torch.tensor([[0.0], [1.0]], device=device), torch.tensor([[1.0, 0.0]], device=device)
    )
    for side in (0, 1):
        assert group_importance(one, factors, gradients, side, 1).tolist() == [9.0, 4.0]
        assert group_importance(one, factors, gradients, side, 1, "group").tolist() == [9.0, 4.0]
        assert group_importance(one, factors, gradients, side, 2).tolist() == [13.0]
        assert group_importance(one, factors, gradients, side, 2, "group").tolist() == [25.0]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(12, 6), (6, 12), (12, 12)]), st.integers(1, 4), st.sampled_from([0, 1]),
    st.sampled_from([1, 2, 3]), st.sampled_from(["exact", "group"]),
    st.sampled_from([1, 5, 12, 99]), st.integers(0, 999),
)  # fmt: skip
def test_streamed_equals_a_loop_over_weights(
    shape: tuple[int, int],
    rank: int,
    side: int,
    size: int,
    score: Score,
    rows_at_once: int,
    seed: int,
) -> None:
    """Row blocks that cut through groups; the weight as a tensor and as a reader."""
    weight, factors, gradients = adapter(*shape, rank, seed)
    read: list[tuple[int, int]] = []

    def rows(first: int, end: int) -> torch.Tensor:
        read.append((first, end))
        return weight[first:end]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importance, "ROWS_AT_ONCE", rows_at_once)
        found = group_importance(weight, factors, gradients, side, size, score)
        again = group_importance(rows, factors, gradients, side, size, score)
    assert (found.dtype, found.shape) == (torch.float64, (shape[side] // size,))
    assert found.tolist() == pytest.approx(
        expected(weight, factors, gradients, side, size, score), rel=1e-9, abs=1e-9
    )
    assert torch.equal(again, found)
    assert [row for first, end in read for row in range(first, end)] == list(range(shape[0]))


def test_gradients_of_parameters_are_detached() -> None:
    weight, factors, gradients = adapter(4, 6, 2)
    live = Factors(torch.nn.Parameter(factors.b), torch.nn.Parameter(factors.a), 1.5)
    found = group_importance(torch.nn.Parameter(weight), live, gradients, 0, 2)
    assert not found.requires_grad


def test_group_importance_is_first_order_change() -> None:
    """The estimate is gB A for B = 0 and gA = 0.

    For A of full row rank and the loss <gB A, W>, this is the loss's gradient in W. The importance
    of a group is the square of the loss's change without the group.
    """
    weight, factors, gradients = adapter(6, 4, 4)
    first = Factors(torch.zeros_like(factors.b), factors.a, 1.5)
    slope = gradients.b @ factors.a
    found = group_importance(
        weight, first, Gradients(gradients.b, torch.zeros_like(gradients.a)), 0, 2, "group"
    )
    lost = [
        float((slope[start : start + 2] * weight[start : start + 2]).sum()) ** 2
        for start in (0, 2, 4)
    ]
    assert found.tolist() == pytest.approx(lost)


def test_what_is_not_finite_shows() -> None:
    weight, factors, gradients = adapter(4, 6, 2)
    gradients.b[1, 0] = math.nan
    assert torch.isnan(group_importance(weight, factors, gradients, 0, 2)).tolist() == [True, False]


# ----- groups of several matrices, and steps ------------------------------------------------------


def test_matrices_are_normalised_before_adding(device: torch.device) -> None:
    """(3, 4) is divided by its norm 5 and (0, 10) by 10; zeros add nothing.

    Without normalisation the sums are 3 and 14.
    """
    one, other, zeros = (
        torch.tensor(values, device=device) for values in ([3.0, 4.0], [0.0, 10.0], [0.0, 0.0])
    )
    assert combined([one, other, zeros]).tolist() == pytest.approx([0.6, 1.8])
    assert combined([one, other, zeros], normalise=False).tolist() == [3.0, 14.0]
    assert combined([zeros]).tolist() == [0.0, 0.0]
    huge = torch.tensor([3e200, 4e200], dtype=torch.float64, device=device)
    assert combined([huge]).tolist() == pytest.approx([0.6, 0.8])


def test_the_moving_average_on_paper(device: torch.device) -> None:
    """8, then 0.75 * 8 + 0.25 * 4 = 7; a step that is not finite is skipped."""
    seen = [
        torch.tensor(values, device=device)
        for values in ([8.0, 0.0], [4.0, 4.0], [math.nan, 1.0], [math.inf, 1.0])
    ]
    first = moving_average(None, seen[0], 0.75)
    assert first is not None
    assert first.tolist() == [8.0, 0.0]
    second = moving_average(first, seen[1], 0.75)
    assert second is not None
    assert second.tolist() == [7.0, 1.0]
    assert moving_average(second, seen[2], 0.75) is second
    assert moving_average(None, seen[3], 0.75) is None
    seen[0].zero_()
    assert first.tolist() == [8.0, 0.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0, 1))
def test_the_moving_average_is_the_weighted_sum(values: list[float], eta: float) -> None:
    found = None
    for value in values:
        found = moving_average(found, torch.tensor([value], dtype=torch.float64), eta)
    last = len(values) - 1
    weights = [eta**last] + [(1 - eta) * eta ** (last - step) for step in range(1, len(values))]
    assert found is not None
    assert float(found) == pytest.approx(float(np.dot(weights, values)), abs=1e-6)
