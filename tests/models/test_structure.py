"""Structures: valid by construction, unchanged by JSON, and with exact costs."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.models.structure import (
    Structure,
    as_ranges,
    from_ranges,
    group_costs,
    structured_plan,
)


def plan(blocks: int = 3, bias: bool = True) -> ModelPlan:
    """Return a plan with three groups, 10 channels, width 8 and biases of query, key and value.

    A group has two query heads of width 4.
    """

    def block(index: int) -> BlockPlan:
        def linear(name: str, rows: int, columns: int, biased: bool = False) -> LinearPlan:
            return LinearPlan(
                name, f"layers.{index}.{name}.weight", (rows, columns), "F32", biased and bias
            )

        linears = (
            linear("attn.q", 24, 8, True), linear("attn.k", 12, 8, True),
            linear("attn.v", 12, 8, True), linear("attn.o", 8, 24), linear("mlp.gate", 10, 8),
            linear("mlp.up", 10, 8), linear("mlp.down", 8, 10),
        )  # fmt: skip
        return BlockPlan(index, linears, (("norm.attn.weight", (16,)),))

    made = tuple(block(index) for index in range(blocks))
    return ModelPlan(made, sum(block.num_parameters for block in made) + 500, 0, 4, 2)


WHOLE = Structure.whole(plan())


def test_costs_by_hand() -> None:
    """A group has 8 rows of query and 4 of key and value, 8 wide with a bias, and 8 columns of 8.

    A channel has 3 times 8.
    """
    base = plan()
    assert group_costs(base, base.blocks[0]) == (16 * 9 + 64, 24)
    assert group_costs(plan(bias=False), base.blocks[1])[1] == 24
    cut = structured_plan(base, WHOLE.keeping({1: {"groups": [0, 2], "channels": [0, 1, 9]}}))
    assert base.num_parameters - cut.num_parameters == 208 + 7 * 24
    dropped = structured_plan(base, WHOLE.with_blocks([0, 2]))
    assert base.num_parameters - dropped.num_parameters == base.blocks[1].num_parameters
    assert dropped.blocks[1].linears[0].parameter == "layers.1.attn.q.weight"


def test_added_biases_cost_a_number_for_each_row() -> None:
    base = plan()
    cut = structured_plan(base, replace(WHOLE, added_biases=("attn.o", "mlp.down")))
    assert cut.num_parameters - base.num_parameters == 3 * 16


@given(st.lists(st.integers(0, 400), min_size=1, unique=True).map(sorted))
def test_ranges_there_and_back(numbers: list[int]) -> None:
    assert from_ranges(as_ranges(numbers)) == tuple(numbers)


def test_ranges_by_hand() -> None:
    assert as_ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3,7,9-10"
    many = ",".join(["0-9999999"] * 2)
    for wrong in ("", "1-", "-1", "a", "1,,2", "0-999999999", many, "1.5", "٣"):
        with pytest.raises(ValueError):
            from_ranges(wrong)


def test_json_there_and_back() -> None:
    cut = WHOLE.keeping({0: {"groups": [1], "mlp_reads": [0, 3, 4, 5]}}).with_blocks([0, 2])
    cut = replace(cut, added_biases=("attn.o",))
    text = json.dumps(cut.to_json())
    assert Structure.from_json(json.loads(text), "here") == cut
    assert Structure.from_json(json.loads(text), "here").sha256 == cut.sha256 != WHOLE.sha256
    assert (WHOLE.is_whole, WHOLE.cuts_residual, WHOLE.keeps_whole_blocks) == (True, False, True)
    assert (cut.is_whole, cut.cuts_residual, cut.keeps_whole_blocks) == (False, True, False)


@pytest.mark.parametrize(
    ("kind", "numbers", "words"),
    [
        ("groups", [], "groups of block 1: none is kept"),
        ("groups", [3], "groups of block 1: 3 does not exist, there are 3"),
        ("channels", [4, 2], "channels of block 1: numbers are not ascending"),
        (
            "channels",
            [4, 4],
            "channels of block 1: numbers are not ascending, or one is there twice",
        ),
        ("attn_writes", [-1, 2], "does not exist"),
    ],
)
def test_what_is_no_structure_is_refused(kind: str, numbers: list[int], words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        WHOLE.keeping({1: {kind: numbers}})


def test_blocks_that_are_none_are_refused() -> None:
    with pytest.raises(EspalierError, match="no block stays"):
        WHOLE.with_blocks([])
    with pytest.raises(EspalierError, match="block 7 is not among those that stay"):
        WHOLE.with_blocks([7])
    with pytest.raises(EspalierError, match="blocks: numbers are not ascending"):
        WHOLE.with_blocks([2, 1])
    with pytest.raises(EspalierError, match=r"added_biases names attn\.q"):
        replace(WHOLE, added_biases=("attn.q",))
    with pytest.raises(EspalierError, match="of a model with 3 blocks"):
        structured_plan(plan(blocks=2), WHOLE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("base"),
        lambda document: document.update(version=2),
        lambda document: document["blocks"][0].update(groups="0-9"),
        lambda document: document["blocks"][0].update(groups=[0]),
        lambda document: document["base"][0].update(groups="3"),
        lambda document: document.update(blocks=3),
        lambda document: document.update(added_biases=[["attn.o"]]),
    ],
)
def test_invalid_document_is_refused_by_name(spoil: object) -> None:
    document = WHOLE.to_json()
    spoil(document)  # type: ignore[operator]
    with pytest.raises(EspalierError, match=r"^structure.json: "):
        Structure.from_json(document, "structure.json")
    for other in (None, [], "x", 3):
        with pytest.raises(EspalierError, match=r"^structure.json: "):
            Structure.from_json(other, "structure.json")
