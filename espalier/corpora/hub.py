"""Hugging Face datasets by name; the library is optional (``pip install -e '.[hub]'``) and fetches or finds the data itself."""

import re
from collections.abc import Iterator
from typing import Any

from espalier.corpora.records import Record
from espalier.settings.mistakes import Mistake

TRAINING_SPLIT = ("data.hub-split", "set it to one of these, or to several joined by +")
"""The key and the remedy where a dataset lacks a split that clients train on."""

CANNOT_BE_LOADED = "cannot be loaded"
"""What is said of a dataset that is not there, or not to be reached."""

TEST_SPLIT = ("task.test-path = ''", "the task's test items are in that split; name a JSON Lines file of public test items")
"""The same where it lacks the split that holds a task's public test items."""


def read_dataset(name: str, config: str, split: str, field: str, label_field: str) -> Iterator[Record]:
    """Yield a text field and a label field of every record of a dataset; without a ``label_field`` labels are empty.

    Raises
    ------
    Mistake
        The library is not installed, the dataset cannot be loaded, or it has no such split or field.
    """
    dataset = load_split(name, config, split, f"data.path = {name!r}: the dataset")
    for key, column in (("data.field", field), ("data.partition-field", label_field)):
        if column and column not in dataset.column_names:
            raise Mistake(f"{key} = {column!r}: the dataset has the fields {', '.join(dataset.column_names)}")
    for record in dataset:
        yield Record(str(record[field]), str(record[label_field]) if label_field else "")


def load_split(name: str, config: str, split: str, called: str, missing: tuple[str, str] = TRAINING_SPLIT) -> Any:
    """Load a split of a dataset that errors call ``called``; ``missing`` is what they say if it has no such split.

    Raises
    ------
    Mistake
        The library is not installed, the dataset cannot be loaded, or it has no such split.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise Mistake("data.source = 'hub': the library 'datasets' is not installed; run: pip install -e '.[hub]'") from None
    try:
        return load_dataset(name, config or None, split=split)
    except Exception as error:
        if lacks := re.match(r'Unknown split "(.*?)"\. Should be one of \[(.*)\]', str(error)):
            key, remedy = missing
            raise Mistake(f"{key}: the dataset {name!r} has no split {lacks[1]!r}, it has {lacks[2]}; {remedy}") from None
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Mistake(f"{called} {CANNOT_BE_LOADED}: {type(error).__name__}: {reason}") from error
