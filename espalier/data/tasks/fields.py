"""Fields of a record with type checks; errors name position and field, and never quote values."""

from collections.abc import Mapping, Sequence
from typing import Any

from espalier.data.files.records import fields_there, kind_of
from espalier.data.files.rows import is_unicode
from espalier.errors import EspalierError, InputError


class Fields:
    """Fields of one record.

    Parameters
    ----------
    where : file and line, or dataset and row, for errors
    """

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self._record = record
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def text(self, name: str, *, may_be_blank: bool = False) -> str:
        """Return a field that is a string.

        With ``may_be_blank`` a null value counts as an empty string. Raises InputError if the field
        is missing, not a string, blank, or not Unicode.
        """
        value = self._value(name)
        if value is None and may_be_blank:
            return ""
        return self._checked(value, name, may_be_blank)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of strings.

        Raises InputError if the list is missing or empty, or an entry is not a string, blank, or
        not Unicode.
        """
        return tuple(self._checked(value, name) for value in self._list(name))

    def inner(self, name: str) -> "Fields":
        """Return a field that is itself a record."""
        value = self._value(name)
        if not isinstance(value, Mapping):
            raise self.refused(
                name,
                f"is not a JSON object but {kind_of(value)}",
                "see the record format of the task",
            )
        return Fields(value, f"{self._where}, field '{name}'")

    def inners(self, name: str) -> list["Fields"]:
        """Return a field that is a list of records."""
        values = self._list(name)
        for place, value in enumerate(values, start=1):
            if not isinstance(value, Mapping):
                why = f"is not a list of JSON objects: item {place} is {kind_of(value)}"
                raise self.refused(name, why, "see the record format of the task")
        where = f"{self._where}, field '{name}', element"
        return [Fields(value, f"{where} {place}") for place, value in enumerate(values, start=1)]

    def is_record(self, name: str) -> bool:
        """Return whether the field is itself a record."""
        return isinstance(self._record.get(name), Mapping)

    def is_list(self, name: str) -> bool:
        """Return whether the field is a list."""
        return isinstance(self._record.get(name), list)

    def is_null(self, name: str) -> bool:
        """Return whether the field is there and null."""
        return name in self._record and self._record[name] is None

    def has_value(self, name: str) -> bool:
        """Return whether the field is there and is neither null nor empty."""
        return bool(self._record.get(name))

    def place(self, name: str, names: Sequence[str], first: int = 0) -> int:
        """Return the index of a field's value among ``names``.

        The value is one of the names, or its number, counted from ``first``. Raises InputError if
        the field is missing or is neither, such as -1 in a dataset that hides its labels.
        """
        value = self._value(name)
        if isinstance(value, str) and value.strip() in names:
            return list(names).index(value.strip())
        if isinstance(value, str) and value.strip() in map(str, range(first, first + len(names))):
            value = int(value)
        if isinstance(value, int) and first <= value < first + len(names):
            return int(value) - first
        kind = kind_of(value)
        if isinstance(value, int) and value < 0:
            kind = "a negative number, as in splits whose labels are not published"
        raise self.refused(
            name,
            f"is not one of the labels {', '.join(names)} and not a number from {first} to"
            f" {first + len(names) - 1}, but {kind}",
            "give the record its label, or use a split that has labels",
        )

    def listed(self, name: str, names: Sequence[str]) -> int:
        """Return the index of a field's value among labels that somebody listed.

        The text of the value is compared first; a truth value has the text ``true`` or ``false``.
        If no label is a number, a number is an index, counted from 0. Raises InputError if the
        field is missing, or its value is not a label.
        """
        value = self._value(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if text in names:
            return list(names).index(text)
        if isinstance(value, bool) or any(map(_is_number, names)):
            raise self.refused(
                name,
                f"is not one of the labels {', '.join(names)}, but {kind_of(value)}",
                "list its values in data.labels as they are written",
            )
        if isinstance(value, int) and 0 <= value < len(names):
            return value
        return self.place(name, names)

    def refused(self, name: str, why: str, remedy: str) -> EspalierError:
        """Return the error for a field, with the reason and the remedy."""
        return InputError(f"{self._where}, field '{name}' {why}; {remedy}")

    def _value(self, name: str) -> Any:
        if name not in self._record:
            raise InputError(
                f"{self._where} has no field '{name}', {fields_there(self._record)}; check that"
                " the file belongs to this task, name the field in data.columns (at a site:"
                " data-columns), or add it"
            )
        return self._record[name]

    def _list(self, name: str) -> list[Any]:
        value = self._value(name)
        if not isinstance(value, list) or not value:
            kind = "an empty one" if isinstance(value, list) else kind_of(value)
            raise self.refused(
                name,
                f"is not a list with at least one element but {kind}",
                "see the record format of the task",
            )
        return value

    def _checked(self, value: Any, name: str, may_be_blank: bool = False) -> str:
        if not isinstance(value, str):
            raise self.refused(
                name, f"is not a string but {kind_of(value)}", "write it as a string"
            )
        if not value.strip() and not may_be_blank:
            raise self.refused(name, "is blank", "give it text, or remove the record")
        if not is_unicode(value):
            raise self.refused(
                name, "contains half of a surrogate pair", "write the file again as UTF-8"
            )
        return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
