"""Hugging Face datasets by name; the library is optional (``pip install -e '.[hub]'``) and fetches or finds the data itself."""

from collections.abc import Iterator

from espalier.corpora.records import Record
from espalier.settings.mistakes import Mistake


def read_dataset(name: str, config: str, split: str, field: str, label_field: str) -> Iterator[Record]:
    """Yield a text field and a label field of every record of a dataset; without a ``label_field`` labels are empty.

    Raises
    ------
    Mistake
        The library is not installed, the dataset cannot be loaded, or it has no such field.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise Mistake("data.source = 'hub': the library 'datasets' is not installed; run: pip install -e '.[hub]'") from None
    try:
        dataset = load_dataset(name, config or None, split=split)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Mistake(f"data.path = {name!r}: the dataset cannot be loaded: {type(error).__name__}: {reason}") from error
    for key, column in (("data.field", field), ("data.partition-field", label_field)):
        if column and column not in dataset.column_names:
            raise Mistake(f"{key} = {column!r}: the dataset has the fields {', '.join(dataset.column_names)}")
    for record in dataset:
        yield Record(str(record[field]), str(record[label_field]) if label_field else "")
