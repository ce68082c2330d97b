"""Selection against a plain ``sorted`` with (score, index) keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.selection.comparison_groups import (
    ComparisonGroup,
    pruned_in_matrix,
    pruned_per_group,
)
from pruning_kernels.selection.selection import select_lowest

GROUPS: list[ComparisonGroup] = ["layer", "row", "column"]


def groups_of(rows: int, columns: int, group: str) -> list[list[tuple[int, int]]]:
    """Return the positions of each comparison group, in order of index."""
    if group == "layer":
        return [[(row, column) for row in range(rows) for column in range(columns)]]
    if group == "row":
        return [[(row, column) for column in range(columns)] for row in range(rows)]
    return [[(row, column) for row in range(rows)] for column in range(columns)]


def sorted_selection(scores: list[list[float]], sparsity: float, group: str) -> list[list[bool]]:
    """Return the mask computed with ``sorted``, group by group."""
    rows = len(scores)
    columns = len(scores[0])
    pruned = [[False] * columns for _ in range(rows)]
    for positions in groups_of(rows, columns, group):
        order = sorted(
            range(len(positions)),
            key=lambda index: (scores[positions[index][0]][positions[index][1]], index),
        )
        for index in order[: int(len(positions) * sparsity)]:
            row, column = positions[index]
            pruned[row][column] = True
    return pruned


def matrices(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
    return sizes.flatmap(
        lambda size: st.lists(
            st.lists(values, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
        )
    )


def test_on_paper(way: torch.device) -> None:
    """At 50%, a row of three loses int(1.5) = 1 weight, a layer of six 3, and a column of two 1."""
    scores = torch.tensor([[3.0, 1.0, 2.0], [6.0, 4.0, 5.0]])
    assert select_lowest(scores.to(way), 0.5, "row").tolist() == [
        [False, True, False],
        [False, True, False],
    ]
    assert select_lowest(scores.to(way), 0.5, "layer").tolist() == [
        [True, True, True],
        [False, False, False],
    ]
    assert select_lowest(scores.to(way), 0.5, "column").tolist() == [
        [True, True, True],
        [False, False, False],
    ]


@settings(max_examples=60, deadline=None)
@given(matrices(st.integers(0, 3).map(float)), st.floats(0, 0.999), st.sampled_from(GROUPS))
def test_equals_sorting_with_many_ties(
    way: torch.device, scores: list[list[float]], sparsity: float, group: ComparisonGroup
) -> None:
    assert select_lowest(
        torch.tensor(scores).to(way), sparsity, group
    ).tolist() == sorted_selection(scores, sparsity, group)


@settings(max_examples=40, deadline=None)
@given(
    matrices(st.floats(0, 2.0**99, width=32)),
    st.sampled_from([0.0, 0.25, 0.5, 0.7, 0.999]),
    st.sampled_from(GROUPS),
)
def test_equals_sorting_of_any_scores(
    way: torch.device, scores: list[list[float]], sparsity: float, group: ComparisonGroup
) -> None:
    assert select_lowest(
        torch.tensor(scores).to(way), sparsity, group
    ).tolist() == sorted_selection(scores, sparsity, group)


@pytest.mark.parametrize("group", GROUPS)
def test_ties_take_lower_index_in_large_matrix(way: torch.device, group: ComparisonGroup) -> None:
    """The matrix is large enough to reveal a sort that is stable only by chance."""
    scores = [[float((row * 7 + column) % 3) for column in range(70)] for row in range(50)]
    assert select_lowest(torch.tensor(scores).to(way), 0.45, group).tolist() == sorted_selection(
        scores, 0.45, group
    )


@pytest.mark.parametrize(
    ("shape", "sparsity", "per_layer", "per_row", "per_column"),
    [
        ((4, 6), 0.5, 12, 3, 2),
        ((3, 5), 0.5, 7, 2, 1),
        ((3, 5), 0.0, 0, 0, 0),
        ((1, 1), 0.99, 0, 0, 0),
        ((10, 10), 0.7, 70, 7, 7),
    ],
)
def test_counts_on_paper(
    shape: tuple[int, int], sparsity: float, per_layer: int, per_row: int, per_column: int
) -> None:
    assert pruned_per_group(shape, sparsity, "layer") == per_layer
    assert pruned_per_group(shape, sparsity, "row") == per_row
    assert pruned_per_group(shape, sparsity, "column") == per_column
    assert pruned_in_matrix(shape, sparsity, "layer") == per_layer
    assert pruned_in_matrix(shape, sparsity, "row") == per_row * shape[0]
    assert pruned_in_matrix(shape, sparsity, "column") == per_column * shape[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 0.999), st.sampled_from(GROUPS))
def test_every_group_loses_exactly_its_share(
    way: torch.device, rows: int, columns: int, sparsity: float, group: ComparisonGroup
) -> None:
    mask = select_lowest(torch.zeros(rows, columns).to(way), sparsity, group).tolist()
    for positions in groups_of(rows, columns, group):
        assert sum(mask[row][column] for row, column in positions) == int(len(positions) * sparsity)


@pytest.mark.parametrize("group", GROUPS)
def test_mask_is_bool_and_contiguous(way: torch.device, group: ComparisonGroup) -> None:
    mask = select_lowest(torch.rand(5, 3).to(way), 0.4, group)
    assert (mask.dtype, mask.shape, mask.is_contiguous()) == (torch.bool, (5, 3), True)


def test_scores_may_be_a_transposed_view(way: torch.device) -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).T
    assert select_lowest(scores.to(way), 0.5, "layer").tolist() == sorted_selection(
        scores.tolist(), 0.5, "layer"
    )


def test_minus_zero_ties_with_zero(way: torch.device) -> None:
    assert select_lowest(torch.tensor([[0.0, -0.0]]).to(way), 0.5, "row").tolist() == [
        [True, False]
    ]


def test_infinite_scores_are_kept_longest(way: torch.device) -> None:
    assert select_lowest(torch.tensor([[math.inf, 1.0]]).to(way), 0.5, "row").tolist() == [
        [False, True]
    ]


def test_infinite_factor_scores_are_refused(way: torch.device) -> None:
    """Infinite scores result from a weight that is not finite."""
    for weight in (math.inf, -math.inf):
        with pytest.raises(ValueError, match="infinity"):
            select_lowest(torch.tensor([[weight, 1.0]]).to(way), 0.5, "row", torch.ones(2).to(way))


@pytest.mark.parametrize("group", GROUPS)
def test_nan_is_refused(way: torch.device, group: ComparisonGroup) -> None:
    with pytest.raises(ValueError, match="NaN"):
        select_lowest(torch.tensor([[1.0, math.nan]]).to(way), 0.5, group)


@pytest.mark.parametrize("group", [*GROUPS, "2:4", "40:80"])
def test_negative_scores_and_sizes_of_all_kinds(way: torch.device, group: ComparisonGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(33, 80, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (33, 80), generator=generator
    )
    scores[3, 5:30] = scores[4, 7]
    mask = select_lowest(scores.to(way), 0.6, group)
    size = {"layer": 33 * 80, "row": 80, "column": 33, "2:4": 4, "40:80": 80}[group]
    pruned = {"2:4": 2, "40:80": 40}.get(group, int(size * 0.6))
    lines = (scores.T if group == "column" else scores).reshape(-1, size).tolist()
    masks = (mask.T if group == "column" else mask).reshape(-1, size).tolist()
    for line, chosen in zip(lines, masks, strict=True):
        order = sorted(range(size), key=lambda index: (line[index], index))
        assert {index for index in range(size) if chosen[index]} == set(order[:pruned])
