"""Which items are a client's own, and which of them it trains on.

As with passages, a hash of the question alone decides both, never the order of the file: a question that occurs again, at
another client or with another answer, falls on the same side.
"""

from collections.abc import Iterable

from espalier.corpora.partition import Partition
from espalier.corpora.passages import digest, is_held_out
from espalier.corpora.tasks.item import Item
from espalier.settings.mistakes import Mistake


def split_items(items: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    """Split items into those to train on and those held out, each item once, in order of first occurrence.

    Items that differ in blank space alone are the same item.

    Returns
    -------
    (train, held_out) : two lists of items that have no question in common
    """
    train: list[Item] = []
    held_out: list[Item] = []
    for item in distinct(items):
        (held_out if is_held_out(item.text) else train).append(item)
    return train, held_out


def distinct(items: Iterable[Item]) -> list[Item]:
    """Each item once, in order of first occurrence."""
    seen: dict[tuple[bytes, ...], Item] = {}
    for item in items:
        parts = (digest(text) for text in (*item.contexts, *item.options, item.gold))
        seen.setdefault(tuple(parts), item)
    return list(seen.values())


def shares_of_items(partition: Partition, items: Iterable[Item]) -> list[list[Item]]:
    """Each client's items, each once; the shares of all clients are disjoint and complete.

    Raises
    ------
    Mistake
        Items are to be dealt out by a label that they do not have.
    """
    items = distinct(items)
    if partition.kind in ("by-field", "dirichlet") and any(not item.label for item in items):
        raise Mistake(
            f"data.partition = {partition.kind!r}: the task has records without a label; choose"
            " 'iid' or 'quantity', or give each record its label"
        )
    return partition.shares(items)
