"""The plan of a model, and the grouping of its blocks into parts."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, cut_into_parts


def test_weights_on_paper() -> None:
    linears = (LinearPlan("attn.q", "q.weight", (4, 6)), LinearPlan("mlp.up", "up.weight", (5, 3)))
    plan = ModelPlan((BlockPlan(0, linears), BlockPlan(1, linears[:1])), num_parameters=1000)
    assert [linear.num_weights for linear in linears] == [24, 15]
    assert [block.num_weights for block in plan.blocks] == [39, 24]
    assert plan.num_weights == 63


@pytest.mark.parametrize(
    ("sizes", "limit", "parts"),
    [
        ([4, 4, 4], 8, [[0, 1], [2]]),
        ([4, 4, 4], 12, [[0, 1, 2]]),
        ([4, 4, 4], 11, [[0, 1], [2]]),
        ([9, 1, 1], 8, [[0], [1, 2]]),
        ([1, 9, 1], 8, [[0], [1], [2]]),
        ([5], 1, [[0]]),
    ],
)
def test_parts_on_paper(sizes: list[int], limit: int, parts: list[list[int]]) -> None:
    assert [list(part) for part in cut_into_parts(sizes, limit)] == parts


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(1, 40))
def test_parts_partition_blocks_and_are_full(sizes: list[int], limit: int) -> None:
    parts = [list(part) for part in cut_into_parts(sizes, limit)]
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or sum(sizes[index] for index in part) <= limit
    for part, following in pairwise(parts):
        assert sum(sizes[index] for index in part) + sizes[following[0]] > limit
