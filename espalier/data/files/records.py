"""Records of JSON Lines files: parser of a line, and descriptions of errors, never quoting it."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from espalier.amounts import count
from espalier.environment.bounded_json import RepeatedKeyError, UnboundedJsonError, read_json
from espalier.errors import EspalierError, InputError


@dataclass(frozen=True)
class Record:
    """Text with its label; the label is empty if the source has none."""

    text: str
    label: str = ""


class FirstLineNamed(dict[str, Any]):
    """Record whose fields have the names in the first line of its file.

    Where a file lacks a header, that line is a record, so errors do not show it.
    """


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")
"""Pattern of field names that errors can show; other names might be private text."""
MAX_NAMES = 12
"""Maximum number of field names in an error."""


def kind_of(value: Any) -> str:
    """Return the kind of a value in JSON's terms."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "a number"
    if isinstance(value, float | Decimal):
        return "a number" if math.isfinite(value) else "a number that is not finite"
    for kind, name in ((str, "a string"), (Mapping, "an object"), (list | tuple, "a list")):
        if isinstance(value, kind):
            return name
    return f"a value of the type {type(value).__name__}"


def is_label(value: Any) -> bool:
    """Return whether a value can label a record: a string, a finite number or a truth value.

    Tables hold null or NaN for a missing label.
    """
    return isinstance(value, str | int) or (
        isinstance(value, float | Decimal) and math.isfinite(value)
    )


def number_as_text(value: float | Decimal) -> str:
    """Return a finite number as text, a whole one without decimal places.

    Tables turn whole numbers into decimal ones if some are missing.
    """
    return str(int(value)) if value == int(value) else str(float(value))


def fields_there(record: Mapping[str, Any], *, kinds: bool = True) -> str:
    """List the fields of a record; fields whose names may be private text are only counted.

    Parameters
    ----------
    kinds : whether to add the kinds of the values
    """
    if isinstance(record, FirstLineNamed):
        return (
            f"its first line, which must name the fields, has {count(len(record), 'field')} (not"
            " shown, because without a header it would be a record)"
        )
    shown = [name for name in record if NAME.fullmatch(name)][:MAX_NAMES]
    named = [f"{name} ({_kind_in(record, name)})" if kinds else name for name in shown]
    if not record:
        return "it has no fields"
    if not shown:
        return f"it has {count(len(record), 'field')} with names that are not shown here"
    if others := len(record) - len(shown):
        named.append(f"{others} more")
    return f"it has the fields {', '.join(named)}"


def _kind_in(record: Mapping[str, Any], name: str) -> str:
    try:
        return kind_of(record[name])
    except EspalierError:
        return "it cannot be read"


ONE_EACH = "write one JSON object per line"
ONE_OF_TWO = "rename or remove one of the two"
TO_UTF8 = (
    "convert it to UTF-8 from the encoding in which it was written, for example from Windows-1252"
    " or Latin-1: iconv -f CP1252 -t UTF-8"
)


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of one line, which may begin with a byte order mark.

    Raises
    ------
    InputError
        The line is not UTF-8, not JSON or not an object; ``where`` names its file and number.
    """
    try:
        text = line.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 (byte {error.start + 1} of the line); {TO_UTF8}"
        ) from None
    try:
        record = read_json(text, unique_keys=True)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {_why(text, error)}; {ONE_EACH}") from None
    except UnboundedJsonError as error:
        raise InputError(f"{where} cannot be read as JSON: {error}; {ONE_EACH}") from None
    except RepeatedKeyError as error:
        raise InputError(f"{where}: {error}; {ONE_OF_TWO}") from None
    except ValueError:
        raise InputError(
            f"{where} cannot be read as JSON: a number has too many digits; write it as a string"
        ) from None
    if not isinstance(record, dict):
        of_array = " (for an array: jq -c '.[]')" if isinstance(record, list) else ""
        raise InputError(
            f"{where} is not a JSON object but {kind_of(record)}; {ONE_EACH}{of_array}"
        )
    return record


def json_array(data: bytes, path: str) -> list[Any]:
    """Return the array that a JSON file consists of.

    Raises InputError if the file is not UTF-8, not JSON or not an array.
    """
    try:
        array = read_json(data.decode(), unique_keys=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; {TO_UTF8}") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: line {error.lineno}, column {error.colno} is not JSON:"
            f" {error.msg.partition(':')[0]}; write the file again"
        ) from None
    except RepeatedKeyError as error:
        raise InputError(f"{path}: {error}; {ONE_OF_TWO}") from None
    except ValueError as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); use JSON Lines") from None
    if not isinstance(array, list):
        raise InputError(f"{path}: is not a JSON array but {kind_of(array)}")
    return array


def _why(text: str, error: json.JSONDecodeError) -> str:
    """Describe why a line is not JSON, by the most common mistakes or the parser's message."""
    body = text.strip()
    if not body.startswith(("{", "[")):
        return "it does not begin with {; plain text and CSV rows are not JSON"
    if error.msg.startswith("Unterminated string"):
        return (
            f"the string in column {error.colno} does not end on this line; write a newline as \\n"
        )
    if body.endswith(",") and _is_json(body[:-1]):
        return "it ends with a comma; JSON Lines has no commas between lines"
    if error.pos >= len(text):
        if body.startswith("["):
            return (
                "it begins an array that does not end on this line (jq -c '.[]' writes JSON Lines)"
            )
        return (
            "it begins an object that does not end on this line (jq -c '.' writes JSON Lines, or"
            " '.NAME[]' if the records are a list in its field NAME)"
        )
    if error.msg == "Extra data":
        return f"more text follows the first value, in column {error.colno}"
    if error.msg.startswith("Invalid control character"):
        return f"a control character in column {error.colno} is not escaped; write a tab as \\t"
    return f"{error.msg.partition(':')[0].removesuffix(' at')} in column {error.colno}"


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except (ValueError, RecursionError):
        return False
    return True
