"""Split and partition of items: disjoint, complete, repeatable, independent of the file's order."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.files.corpus_index import Unit, open_corpus
from espalier.data.files.rows import Row, RowFile
from espalier.data.partition import Kind, Partition
from espalier.data.tasks.item import Item
from espalier.data.tasks.task_source import unit_of

KINDS: tuple[Kind, ...] = ("iid", "by-field", "dirichlet", "quantity")
ITEMS = [
    Item((f"Which tree is number {n}?",), ("oak", "elm"), n % 2, label=f"wood-{n % 3}")
    for n in range(600)
]


class ItemRows(RowFile):
    """Items in memory in place of a file's rows."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__("items", "data.path")
        self.items = items

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        for place, item in enumerate(self.items):
            yield Row((place, 0), "", {"item": item})

    def state(self) -> list[int]:
        return [0, 0, 0, 0]


class Items:
    """Source of items in memory."""

    columns = ()

    def __init__(self, items: Iterable[Item]) -> None:
        self.files = [ItemRows(list(items))]

    def units(self, row: Row) -> list[Unit[Item]]:
        return [unit_of(row.record["item"])]

    def reading(self) -> list[str]:
        return []


def split_items(items: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    train, held_out = open_corpus(Items(items), Path("unused")).share()
    return list(train), list(held_out)


def shares_of_items(partition: Partition, items: Iterable[Item]) -> list[list[Item]]:
    corpus = open_corpus(Items(items), Path("unused"))
    parts = [corpus.share(partition, client) for client in range(partition.num_clients)]
    return [[*train, *held_out] for train, held_out in parts]


def test_a_tenth_is_held_out() -> None:
    train, held_out = split_items(ITEMS)
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, ITEMS))
    assert 35 < len(held_out) < 85


def test_an_item_that_occurs_again_is_kept_once() -> None:
    spaced = Item(("Which  tree is\nnumber 3?",), ("oak", "elm"), 1)
    train, held_out = split_items([ITEMS[3], spaced, ITEMS[3], ITEMS[4]])
    assert Counter([*train, *held_out]) == {ITEMS[3]: 1, ITEMS[4]: 1}


def test_question_stays_on_one_side_of_the_split() -> None:
    others = [Item(item.contexts, ("oak", "yew"), 1, label="other") for item in ITEMS]
    train, held_out = split_items([*ITEMS, *others])
    assert len(train) + len(held_out) == 1200
    assert not {item.text for item in train} & {item.text for item in held_out}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(0, 3))
def test_shares_are_a_partition_in_any_order(kind: Kind, clients: int, seed: int) -> None:
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
