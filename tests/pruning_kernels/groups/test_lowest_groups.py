"""Selection of prunable groups against a plain loop, and sums of scores against nested loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pruning_kernels.groups.groups import (
    coupled_sums,
    lowest_groups,
    searched,
)


@pytest.mark.parametrize(("side", "size"), [(0, 1), (0, 3), (1, 1), (1, 4)])
def test_sums_equal_nested_loops(side: int, size: int) -> None:
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    expected = [0.0] * (scores.shape[side] // size)
    for row in range(6):
        for column in range(8):
            expected[(row, column)[side] // size] += float(scores[row, column])
    assert coupled_sums(scores, side, size).tolist() == pytest.approx(expected)


def walked(
    scores: list[float], costs: list[int], pools: list[int], target: int, gone: set[int]
) -> set[int]:
    """Return the cut of a loop that takes the lowest group that is not the last of its pool."""
    cut = set(gone)
    for group in sorted(range(len(scores)), key=lambda group: (scores[group], group)):
        left = [
            other
            for other in range(len(scores))
            if pools[other] == pools[group] and other not in cut
        ]
        if sum(costs[other] for other in cut) < target and group in left and len(left) > 1:
            cut.add(group)
    return cut


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], list[int], list[int], int]:
    number = draw(st.integers(2, 20))
    scores = draw(
        st.lists(st.sampled_from([-1.5, 0.0, 0.25, 1.0, 7.0]), min_size=number, max_size=number)
    )
    pools = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    cost_of = draw(st.lists(st.integers(1, 9), min_size=4, max_size=4))
    return scores, [cost_of[pool] for pool in pools], pools, draw(st.integers(0, 60))


@given(groups())
def test_the_choice_is_that_of_a_walk(drawn: tuple[list[float], list[int], list[int], int]) -> None:
    scores, costs, pools, target = drawn
    expected = walked(scores, costs, pools, target, set())
    given_tensors = (torch.tensor(scores), torch.tensor(costs), torch.tensor(pools))
    if sum(costs[group] for group in expected) < target:
        with pytest.raises(ValueError, match="all groups but one of each kind and block have"):
            lowest_groups(*given_tensors, target)
        return
    found = lowest_groups(*given_tensors, target)
    assert set(found.nonzero().squeeze(1).tolist()) == expected
    reached = sum(costs[group] for group in expected)
    assert target <= reached < target + max(costs)
    for pool in set(pools):
        assert any(pools[group] == pool and group not in expected for group in range(len(pools)))


@given(groups(), st.integers(0, 60))
def test_growing_target_only_adds_choices(
    drawn: tuple[list[float], list[int], list[int], int], more: int
) -> None:
    scores, costs, pools, target = drawn
    tensors = (torch.tensor(costs), torch.tensor(pools))
    try:
        first = lowest_groups(torch.tensor(scores), *tensors, target)
        second = lowest_groups(-torch.tensor(scores), *tensors, target + more, first)
    except ValueError:
        return
    gone = set(first.nonzero().squeeze(1).tolist())
    assert (second | ~first).all()
    assert set(second.nonzero().squeeze(1).tolist()) == walked(
        [-score for score in scores], costs, pools, target + more, gone
    )


def test_by_hand() -> None:
    """Two blocks with two attention groups (cost 10) and three channels (cost 1)."""
    scores = torch.tensor([0.0, 1.0, 5.0, 0.5, 9.0, 3.0, 4.0, 0.1, 0.2, 0.3])
    costs = torch.tensor([10, 10, 1, 1, 1] * 2)
    pools = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
    cut = lowest_groups(scores, costs, pools, 16)
    assert cut.nonzero().squeeze(1).tolist() == [0, 3, 5, 7, 8]
    second = lowest_groups(scores[5:], costs[5:], pools[5:], 12)
    assert second.nonzero().squeeze(1).tolist() == [0, 2, 3]


@given(groups())
def test_search_finds_least_score(
    drawn: tuple[list[float], list[int], list[int], int],
) -> None:
    """Pools 0 and 2 are of one kind, 1 and 3 of the other; groups of a kind have equal costs.

    The lowest groups of each kind are cut.
    """
    scores = [abs(score) for score in drawn[0]]
    _ = drawn[1]
    pools = drawn[2]
    target = drawn[3]
    kinds = [pool % 2 for pool in pools]
    costs = [(7, 2)[kind] for kind in kinds]
    number = range(len(pools))
    stays = {
        max(
            (group for group in number if pools[group] == pool),
            key=lambda group: (scores[group], group),
        )
        for pool in pools
    }
    free = sorted(
        (group for group in number if group not in stays), key=lambda group: scores[group]
    )
    orders = [[group for group in free if kinds[group] == kind] for kind in (0, 1)]
    choices = [
        {*orders[0][:a], *orders[1][:b]}
        for a in range(len(orders[0]) + 1)
        for b in range(len(orders[1]) + 1)
    ]
    enough = [choice for choice in choices if sum(costs[group] for group in choice) >= target]
    tensors = (torch.tensor(scores), torch.tensor(costs), torch.tensor(pools), torch.tensor(kinds))
    if not enough:
        with pytest.raises(ValueError, match="all groups but one of each kind and block have"):
            searched(*tensors, target)
        return
    found = set(searched(*tensors, target).nonzero().squeeze(1).tolist())
    assert found in enough
    assert sum(scores[group] for group in found) == pytest.approx(
        min(sum(scores[group] for group in own) for own in enough)
    )
