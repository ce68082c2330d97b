"""Base class of all settings tables: hyphenated keys, no unknown keys, no silent conversion."""

import csv
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from espalier.settings.unknown_key import unknown_key

ReadWith = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""Mapping: key -> other key -> values of the other key with which the key is read."""


class Table(BaseModel):
    """Settings table whose keys are written with hyphens, as in ``pyproject.toml``."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
    )

    READ_WITH: ClassVar[ReadWith] = {}
    """Keys that are read only if other keys have given values; all conditions must hold.

    A name with a dot refers to a key of another table.
    """


def comma_separated(text: str) -> list[str]:
    """Return the entries of a list, without blank space around them; none of an empty text.

    An entry in double quotes may contain commas, as in CSV. Raises ValueError if the text contains
    a line break, or a quote that does not end.
    """
    try:
        entries = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise ValueError(
            f"is not a list ({error}); write it in one line, with double quotes around whole"
            " entries only"
        ) from None
    return [entry.strip() for entry in entries]


def columns_of(text: str) -> dict[str, str]:
    """Return the field of a file for each field that a task needs.

    Parameters
    ----------
    text : pairs ``needed=there``, separated by commas (``comma_separated``); empty: none

    Raises
    ------
    ValueError
        A pair lacks a name, or a needed field occurs twice.
    """
    columns: dict[str, str] = {}
    for pair in comma_separated(text):
        needed, _, there = (part.strip() for part in pair.partition("="))
        if not needed or not there:
            raise ValueError(
                f"{pair!r} is not a pair; write needed=there, for example"
                " instruction=question,response=answer; put a pair that contains a comma in double"
                " quotes"
            )
        if needed in columns:
            raise ValueError(f"'{needed}' occurs twice; name one field for it")
        columns[needed] = there
    return columns


def _are_columns(text: str) -> str:
    columns_of(text)
    return text


Columns = Annotated[str, AfterValidator(_are_columns)]
"""Text that ``columns_of`` reads."""


def mistake_lines(
    error: ValidationError,
    known: Sequence[str],
    name: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return one line per invalid value: the key, the given value and what is allowed.

    Parameters
    ----------
    known : all valid dotted keys
    name : name of the validated table; empty for the top-level keys
    elsewhere : tables of the keys that are written in another table than ``name``
    """

    def prefix(detail: Any) -> str:
        table = elsewhere.get(str(detail["loc"][0]), name) if detail["loc"] else name
        return f"{table}." if table else ""

    return [_line(detail, known, prefix(detail)) for detail in error.errors()]


def _line(detail: Any, known: Sequence[str], prefix: str) -> str:
    key = (prefix + ".".join(str(part) for part in detail["loc"])).rstrip(".")
    if detail["type"] == "extra_forbidden":
        return unknown_key(
            key,
            [name for name in known if name.startswith(prefix)]
            # A key of the same table is suggested before one of another.
            + [name for name in known if "." in name],
        )
    if detail["type"] == "missing":
        return f"{key}: has to be given"
    if detail["type"] in ("bool_type", "bool_parsing"):
        return f"{key} = {detail['input']!r}: write true or false"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], Mapping) and detail["type"] == "value_error":
        # A conflict within a table: its message begins with the key and the value.
        return f"{key}.{message}".lstrip(".")
    return f"{key} = {detail['input']!r}: {message[0].lower()}{message[1:]}"
