"""Text and JSON Lines files; errors name the file, the line and the field, and never quote the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from espalier.corpora.records import Record
from espalier.settings.mistakes import Mistake

CLIENT_KEYS = "data.path or the node's data-path"
"""The settings that name a client's file."""


def read_text(path: str, keys: str = CLIENT_KEYS) -> Iterator[str]:
    """Yield the text of a UTF-8 file; ``keys`` are the settings to blame if it cannot be read.

    Raises
    ------
    Mistake
        The file is missing, is not a file, is empty, or is not UTF-8.
    """
    data = _bytes(path, keys)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None
    if not text.strip():
        raise Mistake(f"{path}: the file is empty; name a file with text in it")
    yield text


def read_records(path: str, field: str, label_field: str) -> Iterator[Record]:
    """Yield a text field and a label field of every record of a JSON Lines file; blank lines are passed over.

    Labels may be strings, numbers or truth values; without a ``label_field`` every label is empty.

    Raises
    ------
    Mistake
        The file is missing or empty, a line is not a JSON object, or the field is missing or not a string.
    """
    found = False
    for number, line in enumerate(_bytes(path, CLIENT_KEYS).splitlines(), start=1):
        if not line.strip():
            continue
        found = True
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise Mistake(f"{path}: line {number} is not JSON; write one JSON object per line") from None
        if not isinstance(record, dict):
            raise Mistake(f"{path}: line {number} is not a JSON object; write one JSON object per line")
        if field not in record:
            raise Mistake(f"{path}: line {number} has no field '{field}'; set data.field or the node's data-field")
        if not isinstance(record[field], str):
            raise Mistake(f"{path}: line {number}, field '{field}' is not a string; set data.field or the node's data-field")
        if not _is_unicode(record[field]):
            raise Mistake(
                f"{path}: line {number}, field '{field}' holds half of a surrogate pair; write the file again as UTF-8"
            )
        yield Record(record[field], _label(record, label_field, f"{path}: line {number}"))
    if not found:
        raise Mistake(f"{path}: the file is empty; name a file with records in it")


def _label(record: dict[str, Any], field: str, where: str) -> str:
    if not field:
        return ""
    if not isinstance(record.get(field), str | int | float):
        raise Mistake(f"{where} has no label in field '{field}'; set data.partition-field")
    return str(record[field])


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes(path: str, keys: str) -> bytes:
    file = Path(path).expanduser()
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise Mistake(f"{file.absolute()}: no such file; check {keys}") from None
    except OSError as error:
        raise Mistake(
            f"{file.absolute()}: cannot be read ({error.strerror}); check data.path or the node's data-path"
        ) from None
