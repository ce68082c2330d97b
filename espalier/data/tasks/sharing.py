"""Partition and held-out split of task items.

As with passages, a hash of the question decides, not the order of the file. A question that occurs
again, at another client or with another answer, is on the same side of the split.
"""

from collections.abc import Iterable

from espalier.data.partition import Partition
from espalier.data.passages import digest, is_held_out
from espalier.data.tasks.item import Item
from espalier.errors import InputError


def split_items(items: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    """Split items into training items and held-out items.

    Each item appears once, in order of its first occurrence. Items that differ only in blank space
    are the same item.

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
    """Return each item once, in order of its first occurrence."""
    seen: dict[tuple[bytes, ...], Item] = {}
    for item in items:
        parts = (digest(text) for text in (*item.contexts, *item.options, item.gold))
        seen.setdefault(tuple(parts), item)
    return list(seen.values())


def shares_of_items(partition: Partition, items: Iterable[Item]) -> list[list[Item]]:
    """Return each client's items, each once; the clients' lists are disjoint and complete.

    Raises
    ------
    InputError
        The partition uses labels, and an item has none.
    """
    items = distinct(items)
    if partition.kind in ("by-field", "dirichlet") and any(not item.label for item in items):
        raise InputError(
            f"data.partition = {partition.kind!r}: the task has records without a label; choose"
            " 'iid' or 'quantity', or give each record a label"
        )
    return partition.shares(items)
