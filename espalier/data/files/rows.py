"""Rows of a file of any format: records with their places."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.files.records import (
    FirstLineNamed,
    Record,
    fields_there,
    is_label,
    kind_of,
    number_as_text,
)
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError

Place = tuple[int, int]
"""Start and length of a row in its file.

They are bytes if rows can be read by their bytes; otherwise the row's number, from 0, and 0.
"""


@dataclass(frozen=True)
class Row:
    """Record of a file."""

    place: Place
    where: str
    """File and line or row, for errors."""
    record: Mapping[str, Any]


class ClassNumber(int):
    """Number of a label that a dataset of the library ``datasets`` gives a name.

    Parameters
    ----------
    number : index among ``labels``; -1 in splits whose labels are not published
    """

    labels: tuple[str, ...]

    def __new__(cls, number: int, labels: tuple[str, ...]) -> "ClassNumber":
        """Create a number with the names of all labels."""
        made = super().__new__(cls, number)
        made.labels = labels
        return made

    @property
    def label(self) -> str:
        """Name of the label; the number as text if it has none."""
        return self.labels[self] if 0 <= self < len(self.labels) else str(int(self))


class PlaceCursor:
    """Cursor over the places of the rows that are read, which ascend."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = iter(places)
        self.next: Place | None = next(self._places, None)
        """Next place; None after the last one."""

    def take(self) -> None:
        """Go on to the next place."""
        self.next = next(self._places, None)

    def take_before(self, end: int) -> list[int]:
        """Take the places of rows before row ``end``, and return the rows' numbers."""
        numbers = []
        while self.next is not None and self.next[0] < end:
            numbers.append(self.next[0])
            self.take()
        return numbers


STATUS = ("st_size", "st_ino", "st_mtime_ns", "st_ctime_ns")
"""Properties of a file that reveal a change; the size is the first."""


def status_of(file: Path) -> list[int]:
    """Return the properties of a file that reveal a change."""
    found = file.stat()
    return [getattr(found, name) for name in STATUS]


class RowFile(ABC):
    """File of records.

    Parameters
    ----------
    path : the file, or the folder of a saved dataset
    keys : settings that name it, for errors
    """

    def __init__(self, path: str, keys: str) -> None:
        self.path = path
        self.keys = keys
        self.is_one_of_many = False
        """Whether a directory or pattern names it with others, so that it may be empty."""

    CONTENT: ClassVar[str] = "records"
    """What a file of this format contains, for errors."""

    def rows(self, columns: Sequence[str] = ()) -> Iterator[Row]:
        """Yield all rows in file order, with bounded memory.

        Raises InputError if the file is missing, damaged or not in its format, is empty and not one
        of many, or has no such column.

        Parameters
        ----------
        columns : the only columns that are needed; empty: all
        """
        row = None
        for row in self.read(columns):
            yield row
        if row is None and not self.is_one_of_many:
            raise self.empty()

    @abstractmethod
    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yield all rows, as ``rows`` does; none if the file is empty."""

    def at(self, places: Iterable[Place], columns: Sequence[str] = ()) -> Iterator[Mapping]:
        """Yield the records at ascending places that ``rows`` gave.

        ``places`` is read as far as a few hundred places ahead.
        """
        cursor = PlaceCursor(places)
        for row in self.rows(columns):
            if cursor.next is None:
                return
            if row.place == cursor.next:
                cursor.take()
                yield row.record
        if cursor.next is not None:
            raise self.changed()

    def state(self) -> list[int]:
        """Return size, inode and times of the file, which reveal a change."""
        return status_of(at_home(self.path))

    def shown(self) -> str:
        """Return the file's absolute path, for errors."""
        return str(at_home(self.path).absolute())

    def identity(self) -> str:
        """Return a name of the file that does not depend on the working directory."""
        return os.path.realpath(at_home(self.path))

    def num_bytes(self) -> int:
        """Return the size of the file, or of all files of a folder, in bytes."""
        # The size is the first of each file's properties.
        return sum(self.state()[:: len(STATUS)])

    def changed(self) -> EspalierError:
        """Return the error for a file that changed after it was first read."""
        return InputError(
            f"{self.path}: the file changed while it was read; start the run again when the file"
            " is complete"
        )

    def empty(self) -> EspalierError:
        """Return the error for a file without records."""
        return InputError(
            f"{self.path}: the file is empty; name a file that contains {self.CONTENT}"
        )

    def require_columns(
        self, columns: Sequence[str], there: Sequence[str], *, of_first_line: bool = False
    ) -> None:
        """Refuse a table that lacks a column, or in which two have the same name.

        Raises
        ------
        InputError
            A column is missing; the error names the columns that exist, unless their names are
            those of a first line (``of_first_line``).
        """
        places: dict[str, int] = {}
        for place, name in enumerate(there, start=1):
            if (first := places.setdefault(name, place)) < place:
                raise InputError(
                    f"{self.path}: columns {first} and {place} have the same name; rename or remove"
                    " one"
                )
        for column in columns:
            if column not in there:
                record = (FirstLineNamed if of_first_line else dict).fromkeys(there, "")
                raise InputError(
                    f"{self.path} has no field '{column}', {fields_there(record, kinds=False)};"
                    " set data.field, data.group or data.partition-field, or the node's data-field"
                    " or data-group"
                )


def text_of(row: Row, field: str, label_field: str = "") -> Record:
    """Return the text field of a row, and the label in another one.

    Labels can be strings, numbers or truth values. Without a ``label_field`` the label is empty.
    Raises InputError if a field is missing, the text is not a string, or the label is none.
    """
    record = row.record
    remedy = "set data.field or the node's data-field"
    if field not in record:
        raise InputError(f"{row.where} has no field '{field}', {fields_there(record)}; {remedy}")
    text = record[field]
    if not isinstance(text, str):
        other = "remove the records without text" if text is None else "write it as a string"
        raise InputError(
            f"{row.where}, field '{field}' is not a string but {kind_of(text)}; {other}, or"
            f" {remedy}"
        )
    if not is_unicode(text):
        raise InputError(
            f"{row.where}, field '{field}' contains half of a surrogate pair; write the file again"
            " as UTF-8"
        )
    return Record(text, label_of(row, label_field, "data.partition-field") if label_field else "")


def label_of(row: Row, field: str, key: str) -> str:
    """Return a field that labels a row, as text.

    Raises InputError if the field is missing or is not a string, a finite number or a truth value.

    Parameters
    ----------
    key : setting that names the field, for errors
    """
    if field not in row.record:
        raise InputError(
            f"{row.where} has no field '{field}', {fields_there(row.record)}; set {key}"
        )
    if not is_label(value := row.record[field]):
        raise InputError(
            f"{row.where}, field '{field}' is not a label but {kind_of(value)}; a label must be a"
            " string, a number or a boolean: give the record such a label (a date as a string), or"
            f" set {key}"
        )
    return number_as_text(value) if isinstance(value, float | Decimal) else str(value)


def group_of(row: Row, field: str) -> str:
    """Return the field that joins a row to a group, as text.

    Raises InputError if the field is missing, is no label, or is blank, as CSV writes null.
    """
    group = label_of(row, field, "data.group or the node's data-group")
    if not group.strip():
        raise InputError(
            f"{row.where}, field '{field}' names no group, it is blank; give the record its group,"
            " or set data.group or the node's data-group"
        )
    return group


def is_unicode(text: str) -> bool:
    """Return whether a string can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
