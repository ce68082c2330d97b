"""Fields of a record with type checks; errors name position and field, and never quote values."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from espalier.data.files.records import fields_there, is_label, kind_of, number_as_text
from espalier.data.files.rows import ClassNumber, is_unicode
from espalier.errors import EspalierError, InputError

TRUTH_VALUES = ("false", "true")
EMPTY = ("", "[]", "{}", "null")
"""Texts of a field without a value."""
GIVE_TEXT = "give it text, or remove the record"
FORMAT = "'espalier tasks' shows what a record of the task has"


class Fields:
    """Fields of one record.

    Parameters
    ----------
    where : file and line, or dataset and row, for errors
    columns_of : field of the record for each field of the task that has another name there; None: a
        record within a record, whose fields cannot have other names
    """

    def __init__(
        self, record: Mapping[str, Any], where: str, columns_of: Mapping[str, str] | None = None
    ) -> None:
        self._record = record
        self._where = where
        self._columns_of = columns_of

    def __contains__(self, name: str) -> bool:
        # A field that the settings give another meaning does not count under its own name, too.
        return self._own_name(name) in self._record and not self._reader_of(name)

    def is_mapped(self, name: str) -> bool:
        """Return whether the field has another name, which the settings tell."""
        return name in (self._columns_of or {})

    def read_as(self, name: str) -> str:
        """Return the task's other field that reads the record's field ``name``; empty if none."""
        return self._reader_of(name) if name in self._record else ""

    def text(self, name: str, *, may_be_blank: bool = False, optional: bool = False) -> str:
        """Return a field that is a string.

        With ``may_be_blank`` a null value counts as an empty string, and with ``optional`` a
        missing field. Raises InputError if the field is missing, not a string, blank, or not
        Unicode.
        """
        if optional and name not in self and not self.is_mapped(name):
            return ""
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
                FORMAT,
            )
        return Fields(value, f"{self._where}, field '{name}'")

    def inners(self, name: str) -> list["Fields"]:
        """Return a field that is a list of records."""
        values = self._list(name)
        for place, value in enumerate(values, start=1):
            if not isinstance(value, Mapping):
                why = f"is not a list of JSON objects: item {place} is {kind_of(value)}"
                raise self.refused(name, why, FORMAT)
        where = f"{self._where}, field '{name}', element"
        return [Fields(value, f"{where} {place}") for place, value in enumerate(values, start=1)]

    def is_record(self, name: str) -> bool:
        """Return whether the field is itself a record."""
        return isinstance(self._found(name), Mapping)

    def is_list(self, name: str) -> bool:
        """Return whether the field is a list."""
        return isinstance(self._found(name), list)

    def is_null(self, name: str) -> bool:
        """Return whether the field is there and null."""
        return name in self and self._found(name) is None

    def is_one_or_true(self, name: str) -> bool:
        """Return whether the field is the number 1 or the truth value ``true``."""
        return bool(self._found(name) == 1)

    def has_value(self, name: str) -> bool:
        """Return whether the field is there and is neither null nor empty.

        Tables may hold lists and objects as text.
        """
        value = self._found(name)
        return value.strip() not in EMPTY if isinstance(value, str) else bool(value)

    def place(self, name: str, names: Sequence[str], first: int = 0) -> int:
        """Return the index of a field's value among ``names``.

        The value is one of the names, or its number, counted from ``first``. Of two names counted
        from 0, a truth value is one. In CSV all of these are strings. Raises InputError if the
        field is missing or is neither, such as -1 in a dataset that hides its labels.
        """
        value = self._value(name)
        text = _text_of_label(value, names)
        if text in names:
            return list(names).index(text)
        if (first, len(names)) == (0, 2) and text.lower() in TRUTH_VALUES:
            return TRUTH_VALUES.index(text.lower())
        if text in map(str, range(first, first + len(names))):
            return int(text) - first
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

        The text of the value is compared first; a truth value has the text ``true`` or ``false``,
        also one that is a text in another case.
        Labels that are numbers are compared as numbers. If none is, a number is an index, counted
        from 0. A number that a dataset gives a name has this name, if a label is a name of the
        dataset. Raises InputError if the field is missing, or its value is not a label.
        """
        value = self._value(name)
        text = _text_of_label(value, names)
        if text and text in names:
            return list(names).index(text)
        # Tables write truth values in other cases: TRUE, True.
        if text.lower() in TRUTH_VALUES and text.lower() in names:
            return list(names).index(text.lower())
        counted = not any(map(_is_number, names))
        if _is_number(text):
            # 1.0 is the label 1, as a table or a list may write it.
            same = [place for place, label in enumerate(names) if _are_equal(label, text)]
            if same:
                return same[0]
        if counted and text in map(str, range(len(names))):
            return int(text)
        number = f" and not a number from 0 to {len(names) - 1}" if counted else ""
        remedy = "list its values in data.labels as they are written, or correct the record"
        if isinstance(value, bool):
            remedy = "set data.labels=false,true, or correct the record"
        raise self.refused(
            name,
            f"is not one of the labels {', '.join(names)}{number}, but {kind_of(value)}",
            remedy,
        )

    def refused(self, name: str, why: str, remedy: str) -> EspalierError:
        """Return the error for a field, with the reason and the remedy."""
        return InputError(f"{self._where}, field '{self._own_name(name)}' {why}; {remedy}")

    def refused_whole(self, why: str, remedy: str) -> EspalierError:
        """Return the error for a record as a whole, with its fields and the remedy."""
        return InputError(f"{self._where} {why}, {fields_there(self._record)}; {remedy}")

    def _own_name(self, name: str) -> str:
        """Return the record's name of a field."""
        return (self._columns_of or {}).get(name, name)

    def _reader_of(self, name: str) -> str:
        """Return the task's field that reads the record's field ``name``; empty if itself."""
        if self.is_mapped(name):
            return ""
        named = (self._columns_of or {}).items()
        return next((needed for needed, there in named if there == name), "")

    def _found(self, name: str) -> Any:
        return self._record.get(self._own_name(name)) if name in self else None

    def _value(self, name: str) -> Any:
        if reader := self._reader_of(name):
            raise self.refused(
                name,
                f"is read as the task's field '{reader}'",
                f"name another one for '{name}' or '{reader}' in data.columns (at a site:"
                " data-columns)",
            )
        if name not in self:
            remedy = (
                "check that the file belongs to this task and the case of the letters, name the"
                " field in data.columns (at a site: data-columns), or add it"
            )
            raise InputError(
                f"{self._where} has no field '{name}', {fields_there(self._record)};"
                f" {FORMAT if self._columns_of is None else remedy}"
            )
        return self._found(name)

    def _list(self, name: str) -> list[Any]:
        value = self._value(name)
        if not isinstance(value, list) or not value:
            kind = "an empty one" if isinstance(value, list) else kind_of(value)
            remedy = FORMAT
            if isinstance(value, str):
                remedy = (
                    "write it as a list, in JSON Lines or Parquet (CSV cannot hold lists)"
                    f"; {FORMAT}"
                )
            raise self.refused(name, f"is not a list with at least one element but {kind}", remedy)
        return value

    def _checked(self, value: Any, name: str, may_be_blank: bool = False) -> str:
        if not isinstance(value, str):
            remedy = "write it as a string" if value is not None else GIVE_TEXT
            raise self.refused(name, f"is not a string but {kind_of(value)}", remedy)
        if not value.strip() and not may_be_blank:
            raise self.refused(name, "is blank", GIVE_TEXT)
        if not is_unicode(value):
            raise self.refused(
                name, "contains half of a surrogate pair", "write the file again as UTF-8"
            )
        return value


def _text_of_label(value: Any, names: Sequence[str]) -> str:
    """Return a value as the text that is compared with the names of labels; empty for no label.

    A number to which a dataset gives a name has this name, if the dataset has one of ``names``,
    whatever its case.
    """
    if not is_label(value):
        return ""
    if isinstance(value, ClassNumber):
        known = {name.casefold(): name for name in names}
        if not known.keys().isdisjoint(map(str.casefold, value.labels)):
            return known.get(value.label.casefold(), value.label)
        return str(int(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | Decimal):
        return number_as_text(value)
    return str(value).strip()


def _are_equal(name: str, number: str) -> bool:
    return _is_number(name) and float(name) == float(number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
