"""Hugging Face datasets by name.

The library is optional (``pip install -e '.[hub]'``). It downloads the data or finds it in its
cache.
"""

import re
from collections.abc import Iterator
from typing import Any

from espalier.data.files.records import Record, is_label, kind_of
from espalier.errors import InputError

TRAINING_SPLIT = ("data.hub-split", "set it to one of these, or to several joined by +")
"""Key and remedy for a dataset without the split that clients train on."""

CANNOT_BE_LOADED = "cannot be loaded"
"""Text in the error for a dataset that does not exist or cannot be reached."""

TEST_SPLIT = (
    "task.test-path = ''",
    "the task's test items are in that split; name a JSON Lines file of public test items",
)
"""Key and remedy for a dataset without the split of a task's public test items."""


def read_dataset(
    name: str, config: str, split: str, field: str, label_field: str
) -> Iterator[Record]:
    """Yield a text field and a label field of every record of a dataset.

    Without a ``label_field`` every label is empty. Values of other types are refused, not converted
    to text.

    Raises
    ------
    InputError
        The library is not installed, the dataset cannot be loaded, it has no such split or field,
        or a row has no text or label there.
    """
    dataset = load_split(name, config, split, f"data.path = {name!r}: the dataset")
    for key, column in (("data.field", field), ("data.partition-field", label_field)):
        if column and column not in dataset.column_names:
            raise InputError(
                f"{key} = {column!r}: the dataset has the fields {', '.join(dataset.column_names)}"
            )
    for row, record in enumerate(dataset):
        text = record[field]
        label = record[label_field] if label_field else ""
        where = f"the dataset {name!r} ({split}), row {row} (counted from 0)"
        if not isinstance(text, str):
            remedy = (
                "remove the rows without text"
                if text is None
                else (
                    "name a text column, or create one (for example from messages, with the"
                    " tokenizer's chat template)"
                )
            )
            raise InputError(
                f"data.field = {field!r}: {where} contains {kind_of(text)}, not a string; {remedy}"
            )
        if not is_label(label):
            raise InputError(
                f"data.partition-field = {label_field!r}: {where} contains {kind_of(label)}, but"
                " a label must be a string, a number or a boolean; name another column, or"
                " remove the rows without a label"
            )
        yield Record(text, str(label))


def load_split(
    name: str, config: str, split: str, called: str, missing: tuple[str, str] = TRAINING_SPLIT
) -> Any:
    """Load a split of a dataset.

    Parameters
    ----------
    called : description of the dataset, for errors
    missing : key and remedy for the error if the dataset has no such split

    Raises
    ------
    InputError
        The library is not installed, the dataset cannot be loaded, or it has no such split.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            "data.source = 'hub': the library 'datasets' is not installed; run: pip install -e"
            " '.[hub]'"
        ) from None
    try:
        return load_dataset(name, config or None, split=split)
    except Exception as error:
        if lacks := re.match(r'Unknown split "(.*?)"\. Should be one of \[(.*)\]', str(error)):
            key, remedy = missing
            raise InputError(
                f"{key}: the dataset {name!r} has no split {lacks[1]!r}, only {lacks[2]}; {remedy}"
            ) from None
        reason = (str(error).splitlines() or [""])[0][:200]
        raise InputError(
            f"{called} {CANNOT_BE_LOADED}: {type(error).__name__}: {reason}"
        ) from error
