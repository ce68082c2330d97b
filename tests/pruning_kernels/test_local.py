"""One client's mask of one matrix, checked on paper."""

import pytest
import torch

from pruning_kernels.local import LocalPruning
from pruning_kernels.selection import ComparisonGroup

WEIGHT = torch.tensor([[1.0, -2.0, 4.0, 3.0], [-3.0, 0.5, -6.0, 1.0]])
SQUARE_SUM = torch.tensor([9.0, 16.0, 0.25, 0.0])
"""Norms 3, 4, 0.5, 0: Wanda scores [[3, 8, 2, 0], [9, 2, 3, 0]]."""


@pytest.mark.parametrize(
    ("metric", "group", "expected"),
    [
        ("wanda", "row", [[0, 0, 1, 1], [0, 1, 0, 1]]),
        ("wanda", "layer", [[0, 0, 1, 1], [0, 1, 0, 1]]),
        ("wanda", "column", [[1, 0, 1, 0], [0, 1, 0, 1]]),
        ("magnitude", "row", [[1, 1, 0, 0], [0, 1, 0, 1]]),
        ("magnitude", "layer", [[1, 1, 0, 0], [0, 1, 0, 1]]),
        ("magnitude", "column", [[1, 0, 1, 0], [0, 1, 0, 1]]),
    ],
)
def test_half_of_the_weights_on_paper(metric: str, group: ComparisonGroup, expected: list[list[int]]) -> None:
    mask = LocalPruning(metric, 0.5, group).prune_mask(WEIGHT, SQUARE_SUM)  # type: ignore[arg-type]
    assert mask.int().tolist() == expected


def test_groups_differ_where_rows_have_different_scales() -> None:
    weight = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    ones = torch.ones(2)
    assert LocalPruning("wanda", 0.5, "layer").prune_mask(weight, ones).tolist() == [[True, True], [False, False]]
    assert LocalPruning("wanda", 0.5, "row").prune_mask(weight, ones).tolist() == [[True, False], [True, False]]


def test_magnitude_does_not_look_at_the_activations() -> None:
    nonsense = torch.full((4,), float("nan"))
    assert LocalPruning("magnitude", 0.5, "row").prune_mask(WEIGHT, nonsense).int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]


def test_the_weights_are_left_as_they_were() -> None:
    weight = WEIGHT.clone()
    LocalPruning("wanda", 0.75, "layer").prune_mask(weight, SQUARE_SUM)
    assert torch.equal(weight, WEIGHT)


def test_wanda_by_column_is_magnitude_also_where_a_channel_is_dead() -> None:
    """A channel of zero norm would make all scores of its column tie, and clients with and without it differ."""
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    norms = torch.ones(8, dtype=torch.float64)
    norms[3] = 0
    wanda = LocalPruning("wanda", 0.5, "column").prune_mask(weight, norms)
    assert torch.equal(wanda, LocalPruning("magnitude", 0.5, "column").prune_mask(weight, norms))
