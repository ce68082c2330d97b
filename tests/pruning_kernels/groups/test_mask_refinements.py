"""Mask Tuning's refinements against a greedy search, all choices, loops and NumPy's lstsq."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pruning_kernels.groups import mask_tuning
from pruning_kernels.groups.mask_tuning import (
    best_scales,
    fisher_factor,
    is_positive,
    joint_outputs,
    rearranged,
    unpacked_factor,
)
from pruning_kernels.groups.slicing import packed


def rise(gradients: np.ndarray, cut: set[int]) -> float:
    """Return the quadratic sum, sample by sample and group by group."""
    total = 0.0
    for sample in gradients:
        along = 0.0
        for unit in sorted(cut):
            along += float(sample[unit])
        total += along * along
    return total


def greedy(gradients: np.ndarray, cut: set[int]) -> set[int]:
    """Return the result of the paper's search.

    Each remaining group is cut in turn; of all cut groups, the best one comes back.
    """
    cut = set(cut)
    own = [rise(gradients, {unit}) for unit in range(gradients.shape[1])]
    for unit in sorted(set(range(gradients.shape[1])) - cut, key=lambda unit: own[unit]):
        cut.add(unit)
        cut.remove(min(sorted(cut), key=lambda back: (rise(gradients, cut - {back}), back != unit)))
    return cut


@st.composite
def searches(draw: st.DrawFn) -> tuple[np.ndarray, set[int]]:
    """Draw gradients of a few samples by a few group masks, and cut the least important groups."""
    units = draw(st.integers(2, 7))
    samples = draw(st.integers(1, 5))
    gradients = np.random.default_rng(draw(st.integers(0, 10_000))).standard_normal(
        (samples, units)
    )
    lowest = np.argsort(np.square(gradients).sum(axis=0))[: draw(st.integers(1, units - 1))]
    return gradients, set(map(int, lowest))


def as_mask(cut: set[int], units: int) -> torch.Tensor:
    return torch.tensor([unit in cut for unit in range(units)])


def as_set(cut: torch.Tensor) -> set[int]:
    return set(cut.nonzero().squeeze(1).tolist())


@given(searches())
def test_rearrangement_is_greedy_and_never_worse(
    drawn: tuple[np.ndarray, set[int]],
) -> None:
    gradients, start = drawn
    found = as_set(rearranged(torch.from_numpy(gradients), as_mask(start, gradients.shape[1])))
    assert found == greedy(gradients, start)
    every = [
        rise(gradients, set(some)) for some in combinations(range(gradients.shape[1]), len(start))
    ]
    assert min(every) - 1e-9 <= rise(gradients, found) <= rise(gradients, start) + 1e-9
    # All groups but one are cut, so the best of all remains.
    if len(start) == gradients.shape[1] - 1:
        assert rise(gradients, found) == pytest.approx(min(every))


def test_a_rearrangement_by_hand() -> None:
    """First 2 and -0.1 are cut: 1.9 squared. Then -3 is cut in place of -0.1: 1 squared.

    The search does not find the cut of 3 and -3, whose sum is 0.
    """
    gradients = torch.tensor([[3.0, -3.0, 2.0, -0.1]])
    assert as_set(rearranged(gradients, as_mask({2, 3}, 4))) == {1, 2}


@pytest.mark.parametrize("cut", [set[int](), {0, 1, 2}])
def test_nothing_or_everything_cut_stays(cut: set[int]) -> None:
    assert as_set(rearranged(torch.ones(2, 3), as_mask(cut, 3))) == cut


def test_of_equal_units_none_changes_its_place() -> None:
    assert as_set(rearranged(torch.ones(2, 5), as_mask({1, 3}, 5))) == {1, 3}


@pytest.mark.parametrize(("samples", "units", "rows"), [(3, 7, 3), (7, 3, 3), (2, 7, 4), (9, 6, 4)])
def test_factor_keeps_gradients_information(samples: int, units: int, rows: int) -> None:
    """A factor with fewer rows than samples and groups holds the strongest directions.

    They are compared with NumPy's eigenvectors.
    """
    gradients = torch.randn(samples, units, generator=torch.Generator().manual_seed(1))
    factor = fisher_factor(gradients, rows)
    information = gradients.double().numpy().T @ gradients.double().numpy()
    values, vectors = np.linalg.eigh(information)
    nearest = (vectors[:, -rows:] * values[-rows:]) @ vectors[:, -rows:].T
    np.testing.assert_allclose(factor.T @ factor, nearest, atol=1e-9)
    assert factor.shape == (rows, units)
    assert not factor.tril(-1).any()
    flat = packed(factor)
    assert len(flat) == sum(units - place for place in range(rows))
    assert torch.equal(unpacked_factor(flat, rows, units), factor)


@pytest.mark.parametrize("size", [1, 3])
def test_joint_outputs_equal_nested_loops(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_tuning, "GROUPS_AT_ONCE", 2)
    generator = torch.Generator().manual_seed(2)
    inputs, weight = (
        torch.randn(rows, 5 * size, generator=generator, dtype=torch.float64) for rows in (6, 4)
    )
    expected = np.zeros((5, 5))
    for token in inputs:
        given_by = [
            weight[:, unit * size : (unit + 1) * size] @ token[unit * size : (unit + 1) * size]
            for unit in range(5)
        ]
        for one in range(5):
            for other in range(5):
                expected[one, other] += float(given_by[one] @ given_by[other])
    np.testing.assert_allclose(joint_outputs(inputs.T @ inputs, weight, size), expected, atol=1e-9)


@pytest.mark.parametrize("damping", [1e-6, 0.01, 2.0])
def test_scales_are_those_of_least_squares(damping: float) -> None:
    """NumPy solves A s = b with additional rows that draw s to 1; two columns are nearly equal."""
    outputs = np.random.default_rng(3).standard_normal((40, 6))
    outputs[:, 5] = outputs[:, 4] + 1e-4 * outputs[:, 5]
    aims = outputs @ np.array([2.0, 0.5, 1.0, -1.0, 1.0, 1.5]) + np.random.default_rng(
        4
    ).standard_normal(40)
    joint = outputs.T @ outputs
    weight = np.sqrt(damping * np.diagonal(joint).mean())
    rows = np.vstack([outputs, weight * np.eye(6)])
    wanted = np.concatenate([aims, weight * np.ones(6)])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    found = best_scales(torch.from_numpy(joint), torch.from_numpy(outputs.T @ aims), damping)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_units_without_output_keep_their_scale() -> None:
    zeros = torch.zeros(2, 2)
    impossible = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert best_scales(zeros, torch.zeros(2), 0.01).tolist() == [1, 1]
    assert is_positive(zeros, 0.01)
    assert best_scales(impossible, torch.ones(2), 0.01).isnan().all()
    assert not is_positive(impossible, 0.01)
