"""The cheapest groups that do not overlap, against an exhaustive search."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from pruning_kernels.groups.groups import cheapest_groups


def all_choices(size: int, span: int, number: int) -> list[tuple[int, ...]]:
    """Return every choice of starts that are far enough apart."""
    return [
        starts
        for starts in combinations(range(size), number)
        if all(later - earlier >= span for earlier, later in pairwise(starts))
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("span", [1, 2, 4])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_no_other_choice_is_cheaper(size: int, span: int, number: int) -> None:
    choices = all_choices(size, span, number)
    for seed in range(5):
        costs = np.random.default_rng(seed).random(size).tolist()
        if not choices:
            with pytest.raises(ValueError, match="need"):
                cheapest_groups(costs, span, number)
            continue
        found = cheapest_groups(costs, span, number)
        assert tuple(found) in choices
        assert sum(costs[start] for start in found) == pytest.approx(
            min(sum(costs[s] for s in one) for one in choices)
        )


def test_the_first_cheap_group_may_have_to_stay() -> None:
    """The cheapest group, 1 to 3, leaves no room for a second one."""
    assert cheapest_groups([0.3, 0.2, 0.9, 0.3], 3, 2) == [0, 3]


def test_of_equal_choices_the_earliest_is_taken() -> None:
    assert cheapest_groups([1.0] * 6, 2, 2) == [0, 2]
