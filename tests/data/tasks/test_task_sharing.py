"""Split and partition of items: disjoint, complete, repeatable, independent of the file's order."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.partition import Kind, Partition
from espalier.data.tasks.item import Item
from espalier.data.tasks.reading import shares_of_items, split_items
from espalier.errors import EspalierError

KINDS: tuple[Kind, ...] = ("iid", "by-field", "dirichlet", "quantity")
ITEMS = [
    Item((f"Which tree is number {n}?",), ("oak", "elm"), n % 2, label=f"wood-{n % 3}")
    for n in range(600)
]


def test_a_tenth_is_held_out() -> None:
    train, held_out = split_items(ITEMS)
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, ITEMS))
    assert 35 < len(held_out) < 85


def test_an_item_that_occurs_again_is_kept_once() -> None:
    spaced = Item(("Which  tree is\nnumber 3?",), ("oak", "elm"), 1)
    train, held_out = split_items([ITEMS[3], spaced, ITEMS[3], ITEMS[4]])
    assert Counter([*train, *held_out]) == {ITEMS[3]: 1, ITEMS[4]: 1}


def test_a_question_with_another_answer_stays_on_its_side() -> None:
    others = [Item(item.contexts, ("oak", "yew"), 1, label="other") for item in ITEMS]
    train, held_out = split_items([*ITEMS, *others])
    assert len(train) + len(held_out) == 1200
    assert not {item.text for item in train} & {item.text for item in held_out}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(0, 3))
def test_shares_are_disjoint_and_complete_in_any_order(kind: Kind, clients: int, seed: int) -> None:
    partition = Partition(kind, clients, 0.5, seed)
    shares = shares_of_items(partition, [*ITEMS, *ITEMS[:50]])
    assert len(shares) == clients
    assert Counter(item for share in shares for item in share) == Counter(ITEMS)
    assert [set(share) for share in shares] == [
        set(share) for share in shares_of_items(partition, reversed(ITEMS))
    ]


def test_by_field_gives_whole_labels() -> None:
    labels = [
        {item.label for item in share}
        for share in shares_of_items(Partition("by-field", 2, 1.0, 0), ITEMS)
    ]
    assert labels == [{"wood-0", "wood-2"}, {"wood-1"}]


@pytest.mark.parametrize("kind", ["by-field", "dirichlet"])
def test_items_without_labels_are_not_dealt_out_by_label(kind: Kind) -> None:
    bare = [Item(("Which?",), ("#### 4",), 0)]
    with pytest.raises(
        EspalierError,
        match=f"data.partition = '{kind}': the task has records without a label; choose 'iid'",
    ):
        shares_of_items(Partition(kind, 2, 0.5, 0), bare)
    assert sum(map(len, shares_of_items(Partition("quantity", 2, 0.5, 0), bare))) == 1
