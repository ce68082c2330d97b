"""Readers of items from JSON Lines files and Hugging Face datasets.

Errors name the file, the line and the field, and never quote data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from espalier.data.files.files import CLIENT_KEYS, json_lines
from espalier.data.files.hub import TRAINING_SPLIT, load_split
from espalier.data.files.json_line import json_object
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Task


def read_items(task: Task, path: str, keys: str = CLIENT_KEYS) -> Iterator[Item]:
    """Yield the items of a JSON Lines file; blank lines are skipped.

    Parameters
    ----------
    keys : settings that name the file, for errors

    Raises
    ------
    InputError
        The file is missing, empty or not UTF-8, a line is not a JSON object, a field is missing or
        wrong, or a label is missing or out of range.
    """
    for where, _, line in json_lines(path, keys):
        yield _item(task, json_object(line, where), where)


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
