"""Votes against nested loops, and the selection against a plain ``sorted``."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.selection import ComparisonGroup
from pruning_kernels.votes import VoteCounter, select_most_voted

GROUPS: list[ComparisonGroup] = ["layer", "row", "column"]


def words_of(bits: list[bool]) -> np.ndarray:
    """Packed mask, by integer arithmetic."""
    words = [0] * ((len(bits) + 63) // 64)
    for index, bit in enumerate(bits):
        words[index // 64] += int(bit) << (index % 64)
    return np.array(words, dtype=np.uint64)


def counted(masks: list[list[bool]]) -> list[int]:
    """Votes by the counter under test."""
    counter = VoteCounter(len(masks[0]))
    for mask in masks:
        counter.add(words_of(mask))
    assert counter.num_votes == len(masks)
    return counter.counts().tolist()


def most_voted_by_sorting(
    counts: list[list[int]], sparsity: float, group: str, keys: list[list[float]] | None
) -> list[list[bool]]:
    """Sort each group by (-votes, key, index) and prune its first weights."""
    rows, columns = len(counts), len(counts[0])
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    number = {"layer": lambda cell: 0, "row": lambda cell: cell[0], "column": lambda cell: cell[1]}[group]
    pruned = [[False] * columns for _ in range(rows)]
    for line in sorted({number(cell) for cell in cells}):
        competing = [cell for cell in cells if number(cell) == line]
        order = sorted(
            range(len(competing)),
            key=lambda index: (
                -counts[competing[index][0]][competing[index][1]],
                keys[competing[index][0]][competing[index][1]] if keys else 0,
                index,
            ),
        )
        for index in order[: int(len(competing) * sparsity)]:
            row, column = competing[index]
            pruned[row][column] = True
    return pruned


@st.composite
def votes_and_keys(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]]]:
    rows, columns, highest = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.sampled_from([0, 1, 3, 300]))
    line = lambda values: st.lists(values, min_size=columns, max_size=columns)  # noqa: E731
    counts = draw(st.lists(line(st.integers(0, highest)), min_size=rows, max_size=rows))
    keys = draw(st.lists(line(st.sampled_from([0.0, 0.5, 1.5])), min_size=rows, max_size=rows))
    return counts, keys


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counts_equal_nested_loops(data: st.DataObject) -> None:
    weights = data.draw(st.integers(1, 150))
    mask = st.lists(st.booleans(), min_size=weights, max_size=weights)
    masks = data.draw(st.lists(mask, min_size=1, max_size=9))
    expected = [0] * weights
    for one in masks:
        for index, bit in enumerate(one):
            expected[index] += bit
    assert counted(masks) == expected


@pytest.mark.parametrize("clients", [127, 128, 129, 255, 256, 257, 300])
def test_more_clients_than_a_byte_holds(clients: int) -> None:
    """Weight 0 gets every vote, weight 1 none, weight 2 every second, weight 66 the last one."""
    masks = [[True, False, client % 2 == 0] + [False] * 63 + [client == clients - 1] for client in range(clients)]
    counts = counted(masks)
    assert (counts[0], counts[1], counts[2], counts[66]) == (clients, 0, (clients + 1) // 2, 1)
    assert sum(counts) == clients + (clients + 1) // 2 + 1


def test_counts_do_not_depend_on_the_order_of_arrival() -> None:
    masks = [[(index * client) % 3 == 0 for index in range(70)] for client in range(1, 8)]
    assert counted(masks) == counted(masks[::-1])


def test_a_counter_without_votes_counts_zero() -> None:
    assert VoteCounter(3).counts().tolist() == [0, 0, 0]


def test_counter_and_caller_do_not_share_a_mask() -> None:
    counter, mask = VoteCounter(4), words_of([True, False, True, True])
    counter.add(mask)
    assert mask.tolist() == [0b1101]
    mask[:] = 0
    counter.add(mask)
    assert counter.counts().tolist() == [1, 0, 1, 1]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 words"):
        VoteCounter(65).add(np.zeros(1, dtype=np.uint64))


def test_selection_on_paper() -> None:
    """Half of six: the two weights with 3 votes, then among those with 2 votes the one of smaller magnitude."""
    counts = np.array([[3, 2, 0], [2, 3, 1]], dtype=np.int32)
    magnitude = np.array([[9.0, 0.7, 0.0], [0.2, 9.0, 0.0]])
    assert select_most_voted(counts, 0.5, "layer", magnitude).tolist() == [[True, False, False], [True, True, False]]
    assert select_most_voted(counts, 0.5, "layer").tolist() == [[True, True, False], [False, True, False]]


@settings(max_examples=80, deadline=None)
@given(votes_and_keys(), st.floats(0, 0.999), st.sampled_from(GROUPS), st.booleans())
def test_selection_equals_sorting(
    drawn: tuple[list[list[int]], list[list[float]]], sparsity: float, group: ComparisonGroup, with_key: bool
) -> None:
    counts, keys = drawn
    found = select_most_voted(np.array(counts, dtype=np.int32), sparsity, group, np.array(keys) if with_key else None)
    assert found.dtype == np.bool_
    assert found.tolist() == most_voted_by_sorting(counts, sparsity, group, keys if with_key else None)


@pytest.mark.parametrize("group", GROUPS)
def test_equal_votes_and_equal_keys_go_by_index(group: ComparisonGroup) -> None:
    counts = [[4] * 6 for _ in range(4)]
    found = select_most_voted(np.array(counts, dtype=np.int32), 0.5, group, np.zeros((4, 6)))
    assert found.tolist() == most_voted_by_sorting(counts, 0.5, group, None)


@settings(max_examples=40, deadline=None)
@given(votes_and_keys(), st.floats(0, 0.999), st.sampled_from(GROUPS))
def test_every_group_loses_exactly_its_share(
    drawn: tuple[list[list[int]], list[list[float]]], sparsity: float, group: ComparisonGroup
) -> None:
    counts = np.array(drawn[0], dtype=np.int32)
    mask = select_most_voted(counts, sparsity, group)
    lines = {"layer": [mask.reshape(-1)], "row": list(mask), "column": list(mask.T)}[group]
    assert {sum(line.tolist()) for line in lines} == {int(len(lines[0]) * sparsity)}


def test_unanimous_clients_get_their_own_mask() -> None:
    """The paper's sanity check: if all clients agree, the votes change nothing."""
    own = [[True, False, False, True], [False, True, True, False]]
    counter = VoteCounter(8)
    for _ in range(5):
        counter.add(words_of(own[0] + own[1]))
    assert select_most_voted(counter.counts().reshape(2, 4), 0.5, "layer").tolist() == own
