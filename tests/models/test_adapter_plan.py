"""Adapters that the settings ask for: shapes and numbers; errors name the key."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.models.adapters import Adapter, AdapterPlan, adapter_plan
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.tables.lora import LoraSettings

SHAPES = {"attn.q": (16, 16), "attn.v": (8, 16), "mlp.up": (40, 16), "mlp.down": (16, 40)}
PLAN = ModelPlan(
    tuple(
        BlockPlan(index, tuple(LinearPlan(name, name, shape) for name, shape in SHAPES.items()))
        for index in range(4)
    ),
    9999,
)


def plan_of(**lora: Any) -> AdapterPlan:
    return adapter_plan(PLAN, LoraSettings(**lora))


def ranks(plan: AdapterPlan) -> dict[int, dict[str, int]]:
    return {
        index: {adapter.linear.name: adapter.rank for adapter in plan.blocks[index]}
        for index in plan.blocks
    }


def test_all_blocks_and_matrices() -> None:
    assert ranks(plan_of(targets="all", rank=3)) == {
        index: dict.fromkeys(SHAPES, 3) for index in range(4)
    }


def test_ranges() -> None:
    """Adapters come in the order of the block, whatever order the settings use."""
    plan = plan_of(targets="mlp.up,attn.q", layers="3,0-1", rank=2, alpha=3.0)
    assert ranks(plan) == {index: {"attn.q": 2, "mlp.up": 2} for index in (0, 1, 3)}
    assert [(index, adapter.linear.name) for index, adapter in plan] == [
        (index, name) for index in (0, 1, 3) for name in ("attn.q", "mlp.up")
    ]
    assert {adapter.scaling for _, adapter in plan} == {1.5}


def test_shapes_by_hand() -> None:
    assert plan_of(targets="attn.v,mlp.down", layers="2", rank=3).shapes() == {
        "block-0002": {
            "attn.v.lora_a": (3, 16),
            "attn.v.lora_b": (8, 3),
            "mlp.down.lora_a": (3, 40),
            "mlp.down.lora_b": (16, 3),
        }
    }


def test_a_head_comes_last_and_whole() -> None:
    plan = replace(
        plan_of(rank=2, layers="1"),
        whole={"head": {"head.out.weight": (3, 16), "head.out.bias": (3,)}},
    )
    assert list(plan.shapes()) == ["block-0001", "head"]
    assert plan.shapes()["head"] == {"head.out.weight": (3, 16), "head.out.bias": (3,)}
    assert plan.num_parameters == 2 * (16 + 16) + 2 * (8 + 16) + 3 * 16 + 3
    assert plan.limited(1).head == plan.head


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 10),
    st.sets(st.sampled_from(sorted(SHAPES)), min_size=1),
    st.integers(1, 4),
)
def test_the_number_of_parameters_and_a_limit(
    rank: int, limit: int, targets: set[str], layers: int
) -> None:
    """A matrix has rank * (in + out) parameters."""
    plan = plan_of(targets=",".join(sorted(targets)), layers=f"0-{layers - 1}", rank=rank)
    assert plan.num_parameters == layers * rank * sum(sum(SHAPES[name]) for name in targets)
    limited = plan.limited(limit)
    assert limited.num_parameters * rank == plan.num_parameters * min(rank, limit)
    assert {adapter.scaling for _, adapter in limited} == {16.0 / rank}
    assert limited.limited(rank) == limited


def test_a_limit_cuts_larger_ranks_alone() -> None:
    assert ranks(plan_of(targets="all", rank=4).limited(3))[0] == dict.fromkeys(SHAPES, 3)
    assert Adapter(PLAN.blocks[0].linears[0], 4, 2.0).limited(9).rank == 4


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"targets": "attn.q,mlp.gate"},
            r"lora.targets: the model has no mlp.gate; its blocks have attn.q, attn.v, mlp.up",
        ),
        ({"layers": "2-4"}, r"lora.layers = '2-4': the model has the blocks 0 to 3"),
        (
            {"rank": 9},
            r"9 is larger than a side of attn.v in block 0 \(8 x 16\); lower it to 8 or less",
        ),
        (
            {"alpha": 0.07},
            r"lora.alpha: alpha / rank is 0.00875; choose them so that it is 0.01 to 1000",
        ),
        ({"alpha": 8001.0}, r"lora.alpha: alpha / rank is 1000.1"),
    ],
)
def test_unknown_blocks_and_matrices_name_key(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        plan_of(**lora)
