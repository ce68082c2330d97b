"""Items of a task from files and Hugging Face datasets; their partition and split.

Errors name the file, the line and the field, and never quote data.

As with passages, a hash of the question decides, not the order of the file. A question that occurs
again, at another client or with another answer, is on the same side of the split.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from espalier.data.files.files import CLIENT_KEYS, JsonLinesRows
from espalier.data.files.formats import open_rows
from espalier.data.files.hub import TRAINING_SPLIT, load_split
from espalier.data.partition import Partition
from espalier.data.passages import digest, is_held_out
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Task
from espalier.errors import InputError


def read_items(task: Task, path: str, keys: str = CLIENT_KEYS) -> Iterator[Item]:
    """Yield the items of some files (``formats.open_rows``).

    Parameters
    ----------
    keys : settings that name the file, for errors

    Raises
    ------
    InputError
        A file is missing, empty, damaged or not in its format, a field is missing or wrong, or a
        label is missing or out of range.
    """
    for file in open_rows(path, keys, other=JsonLinesRows):
        for row in file.rows():
            yield _item(task, row.record, row.where)


def read_hub_items(
    task: Task,
    split: str,
    name: str = "",
    config: str = "",
    missing: tuple[str, str] = TRAINING_SPLIT,
) -> Iterator[Item]:
    """Yield the items of a dataset's split.

    Parameters
    ----------
    name : dataset; empty: the task's own dataset on the hub
    missing : key and remedy for the error if the dataset has no such split

    Raises
    ------
    InputError
        The library is not installed, the dataset cannot be loaded or lacks the split, a field is
        missing or wrong, or a label is missing or out of range, as in test splits whose labels are
        hidden.
    """
    called = f"data.path = {name!r}: the dataset"
    if not name:
        name = task.hub.name
        config = config or task.hub.config
        called = f"task.name = '{task.name}': its dataset {name!r}"
    dataset = load_split(name, config, split, called, missing)
    for number, record in enumerate(dataset, start=1):
        yield _item(task, record, f"{name} ({split}): record {number}")


def _item(task: Task, record: Mapping[str, Any], where: str) -> Item:
    named = f"{where} (task {task.name})"
    return replace(task.item(Fields(record, named)), where=named)


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
