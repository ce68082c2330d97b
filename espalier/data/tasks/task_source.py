"""Items of a task as a source: from files and Hugging Face datasets.

Errors name the file, the line or row, and the field, and never quote data.

As with passages, a hash of the question decides about partition and split, not the order of the
file. A question that occurs again, at another client or with another answer, is on the same side.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.data.files.corpus_index import Unit
from espalier.data.files.files import CLIENT_KEYS, JsonLinesRows
from espalier.data.files.formats import open_rows
from espalier.data.files.hub import TRAINING_SPLIT, HubRows
from espalier.data.files.records import fields_there
from espalier.data.files.rows import Row, RowFile, group_of, label_of
from espalier.data.passages import digest
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Task
from espalier.errors import InputError

PARTITION_FIELD = "data.partition-field"


@dataclass(frozen=True)
class ItemSource:
    """Files with records of a task, whose items are the units."""

    task: Task
    files: tuple[RowFile, ...]
    columns_of: Mapping[str, str] = field(default_factory=dict)
    """Field of the file for each field of the task that has another name there."""
    group_field: str = ""
    """Field whose value joins records that are never separated; empty: every item is a group."""
    label_field: str = ""
    """Field whose value labels a record for partitions; empty: the task's own label."""
    wording: tuple[str, ...] = ()
    """Settings that change the items of the task: its prompt and its labels."""
    may_have_own_names: bool = False
    """Whether records may have the task's own names for all fields instead of ``columns_of``."""

    @property
    def columns(self) -> Sequence[str]:
        """Fields that are read: all."""
        return ()

    def units(self, row: Row) -> Iterator[Unit[Item]]:
        """Yield the item of a record."""
        group = group_of(row, self.group_field) if self.group_field else ""
        label = label_of(row, self.label_field, PARTITION_FIELD) if self.label_field else None
        yield unit_of(self.item(row), group, label)

    def item(self, row: Row) -> Item:
        """Return the item of a record.

        Raises InputError if a field is missing or wrong, or a label is missing or out of range.
        """
        columns_of = self.columns_of
        if self.may_have_own_names and _has_own_names(row.record, columns_of):
            columns_of = {}
        for needed, there in columns_of.items():
            # The columns of a site may also have names for other tasks.
            if needed in self.task.fields and there not in row.record:
                raise InputError(
                    f"{row.where} has no field '{there}' for the task's field '{needed}',"
                    f" {fields_there(row.record)}; set data.columns or the node's data-columns"
                )
        where = f"{row.where} (task {self.task.name})"
        return replace(self.task.item(Fields(row.record, where, columns_of)), where=where)

    def items(self) -> Iterator[Item]:
        """Yield all items in the order of the files."""
        for file in self.files:
            yield from map(self.item, file.rows())

    def reading(self) -> list[str]:
        """Return what determines the item of a record."""
        renamed = [f"{name}={of}" for name, of in sorted(self.columns_of.items())]
        named = (self.task.name, self.group_field, self.label_field, *self.wording)
        return ["task", *named, *renamed]


def _has_own_names(record: Mapping[str, Any], columns_of: Mapping[str, str]) -> bool:
    """Return whether a record has all mapped fields under the task's names, not as mapped."""
    as_mapped = all(there in record for there in columns_of.values())
    return not as_mapped and all(needed in record for needed in columns_of)


def require_fields_of(task: Task, columns_of: Mapping[str, str]) -> None:
    """Refuse names for fields that a task does not have."""
    if unknown := [name for name in columns_of if name not in task.fields]:
        raise InputError(
            f"data.columns: the task {task.name} has no field {', '.join(map(repr, unknown))}, only"
            f" {', '.join(task.fields)}; write the task's field before the = and that of the file"
            " after it"
        )


def require_fields_differ(task: Task, columns_of: Mapping[str, str]) -> None:
    """Refuse one field of the records for two of a task, such as a question and its answer."""
    reader: dict[str, str] = {}
    for needed, there in columns_of.items():
        # The columns of a site may also have names for other tasks.
        if needed in task.fields and (first := reader.setdefault(there, needed)) != needed:
            raise InputError(
                f"data.columns or the node's data-columns: '{first}' and '{needed}' both name the"
                f" field '{there}'; name another one for one of them"
            )


def unit_of(item: Item, group: str = "", label: str | None = None) -> Unit[Item]:
    """Return an item with the hashes that decide its client and its side of the split.

    Items that differ only in blank space are the same item.

    Parameters
    ----------
    group : value that the item has in common with others that it is not separated from
    label : label for partitions; None: that of the item
    """
    # All texts that a model reads or has to write, so that only equal items are duplicates.
    parts = (digest(text) for text in (*item.contexts, *item.options, item.gold))
    own = hashlib.sha256(b"".join(parts)).digest()
    # The group or else the question decides client and side, whatever the answer.
    key = digest(group or item.text)
    return Unit(item, own, key, key, key.hex() if group else item.label if label is None else label)


def items_in(
    task: Task, path: str, keys: str = CLIENT_KEYS, columns_of: Mapping[str, str] | None = None
) -> ItemSource:
    """Return the items of the files that a path names (``formats.open_rows``).

    Files whose ending names no format are JSON Lines.

    Parameters
    ----------
    keys : settings that name the path, for errors
    columns_of : field of the file for each field of the task that has another name there
    """
    return ItemSource(task, tuple(open_rows(path, keys, other=JsonLinesRows)), columns_of or {})


def hub_rows(
    task: Task,
    split: str,
    name: str,
    config: str,
    missing: tuple[str, str] = TRAINING_SPLIT,
) -> HubRows:
    """Return the records of a dataset's split.

    Parameters
    ----------
    name : dataset; empty: the task's own dataset on the hub
    missing : key and remedy for the error if the dataset has no such split
    """
    called = f"data.path = {name!r}: the dataset"
    if not name:
        name = task.hub.name
        config = config or task.hub.config
        called = f"task.name = '{task.name}': its dataset {name!r}"
    return HubRows(name, config, split, called, missing)
