"""Readers of text and JSON Lines files, block by block.

Errors name the file, the line and the field, and never quote the text.
"""

import codecs
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from espalier.data.files.file_kinds import HEAD_BYTES, kind_refused
from espalier.data.files.records import (
    TO_UTF8,
    Record,
    fields_there,
    is_label,
    json_object,
    kind_of,
)
from espalier.data.passages import BLANK, full_parts, parts
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.progress import Share

CLIENT_KEYS = "data.path or the node's data-path"
"""Settings that name a client's file."""

BLOCK_BYTES = 1 << 22
"""Number of bytes that are read at a time; only a longer line of JSON Lines needs more memory."""

_BLANK_LINES = re.compile(rb"\n(?:[ \t]*\r?\n)+")


@dataclass(frozen=True)
class Located:
    """Record with the bytes of the file from which ``text_record`` or ``json_record`` makes it."""

    start: int
    length: int
    record: Record


def text_records(path: str) -> Iterator[Located]:
    """Yield the passages of a UTF-8 file in file order.

    Raises
    ------
    InputError
        The file is missing, is not a regular file, is empty, or is not UTF-8 text.
    """
    found = False
    with opened(path, CLIENT_KEYS) as file:
        for start, data in _between_blank_lines(file):
            try:
                record = text_record(data)
            except UnicodeDecodeError as error:
                raise not_utf8(path, start, error) from None
            if record.text:
                found = True
                yield Located(start, len(data), record)
    if not found:
        raise InputError(f"{path}: the file is empty; name a file that contains text")


def text_record(data: bytes) -> Record:
    """Return the record of a passage of a text file.

    Raises
    ------
    UnicodeDecodeError
        The bytes are not UTF-8.
    """
    return Record(data.decode().replace("\r\n", "\n").strip("\n").rstrip())


def json_records(path: str, field: str, label_field: str) -> Iterator[Located]:
    """Yield a text field and a label field of every record of a JSON Lines file.

    Blank lines are skipped. Labels can be strings, numbers or truth values. Without a
    ``label_field`` every label is empty.

    Raises
    ------
    InputError
        The file is missing, empty or not UTF-8 text, a line is not a JSON object, the field is
        missing or not a string, or the label is missing.
    """
    for where, start, line in json_lines(path):
        yield Located(start, len(line), json_record(line, field, label_field, where))


def json_lines(path: str, keys: str = CLIENT_KEYS) -> Iterator[tuple[str, int, bytes]]:
    """Yield the lines of a JSON Lines file that are not blank.

    Parameters
    ----------
    keys : settings that name the file, for errors

    Yields
    ------
    (where, start, line) : position for errors, offset of the first byte, and bytes of the line

    Raises
    ------
    InputError
        The file is missing, is not a regular file, has no records, or is not text.
    """
    found = False
    with opened(path, keys) as file:
        for number, (start, line) in enumerate(_lines(file), start=1):
            if line.strip():
                found = True
                yield f"{path}: line {number}", start, line
    if not found:
        raise InputError(f"{path}: the file is empty; name a file that contains records")


def json_record(line: bytes, field: str, label_field: str, where: str) -> Record:
    """Return the record of one line.

    The errors are those of ``json_records`` and begin with ``where``.
    """
    record = json_object(line, where)
    remedy = "set data.field or the node's data-field"
    if field not in record:
        raise InputError(f"{where} has no field '{field}', {fields_there(record)}; {remedy}")
    if not isinstance(record[field], str):
        raise InputError(
            f"{where}, field '{field}' is not a string but {kind_of(record[field])}; write it as"
            f" a string, or {remedy}"
        )
    if not _is_unicode(record[field]):
        raise InputError(
            f"{where}, field '{field}' contains half of a surrogate pair; write the file again"
            " as UTF-8"
        )
    return Record(record[field], _label(record, label_field, where))


def _label(record: dict[str, Any], field: str, where: str) -> str:
    if not field:
        return ""
    if field not in record:
        raise InputError(
            f"{where} has no label in field '{field}', {fields_there(record)}; set"
            " data.partition-field"
        )
    if not is_label(value := record[field]):
        raise InputError(
            f"{where}, field '{field}' is not a label but {kind_of(value)}; a label must be a"
            " string, a number or a boolean: give the record such a label, or set"
            " data.partition-field"
        )
    return str(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _between_blank_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the passages of a file with the offset of each.

    A byte order mark is left out. A very long passage is cut even before its end is read. A blank
    line has only spaces and tabs. Lines end with a newline, which may follow a carriage return.
    """
    # A newline in front lets the pattern find blank lines at the beginning of the file.
    waiting = bytearray(b"\n")
    start = behind_mark(file) - 1
    # Blank lines that begin before this place were found already.
    seen = 0
    for block in blocks(file):
        waiting += block
        # Index of the newline before the text that was not yielded yet.
        place = 0
        for blank in _BLANK_LINES.finditer(waiting, seen):
            if blank.start() > place:
                yield from (
                    (start + first, bytes(waiting[first:end]))
                    for first, end in parts(waiting, place + 1, blank.start())
                )
            # The last newline of a blank line precedes the next passage.
            place = blank.end() - 1
        if filled := len(block.rstrip(BLANK)):
            seen = len(waiting) - len(block) + filled
        for first, end, following in full_parts(waiting, place + 1, seen):
            yield start + first, bytes(waiting[first:end])
            place = following - 1
        start = start + place
        seen = max(0, seen - place)
        del waiting[:place]
    yield from (
        (start + first, bytes(waiting[first:end])) for first, end in parts(waiting, 1, len(waiting))
    )


def behind_mark(file: BinaryIO) -> int:
    """Skip a byte order mark at the beginning of a file; return the offset of the text."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    return file.seek(start)


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in blocks and report progress.

    Raises
    ------
    InputError
        A byte is NUL, which does not occur in text.
    """
    share = Share(f"reading {Path(file.name).name}", os.fstat(file.fileno()).st_size)
    while block := file.read(BLOCK_BYTES):
        if (place := block.find(0)) >= 0:
            raise InputError(
                f"{file.name}: byte {file.tell() - len(block) + place} is NUL: the file is not"
                " text, not in UTF-8, or damaged; write it again as UTF-8 text without NUL"
                " bytes"
            )
        share(file.tell())
        yield block


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, with their line ends, and the offset of each."""
    start = 0
    waiting = b""
    for block in blocks(file):
        lines = (waiting + block).splitlines(keepends=True)
        # A line that ends with a carriage return may go on: its newline can be in the next block.
        waiting = b"" if lines[-1].endswith(b"\n") else lines.pop()
        for line in lines:
            yield start, line
            start += len(line)
    for line in waiting.splitlines(keepends=True):
        yield start, line
        start += len(line)


def not_utf8(path: str, start: int, error: UnicodeDecodeError) -> EspalierError:
    """Return the error for bytes from offset ``start`` on that could not be decoded."""
    place = start + error.start
    if error.reason == "unexpected end of data":
        return InputError(
            f"{path}: byte {place} is not UTF-8: the text ends within a character; copy the file"
            " again"
        )
    return InputError(f"{path}: byte {place} is not UTF-8; {TO_UTF8}")


@contextmanager
def opened(path: str, keys: str) -> Iterator[BinaryIO]:
    """Open a file of UTF-8 text for reading.

    Parameters
    ----------
    keys : settings that name the file, for errors

    Raises
    ------
    InputError
        The file is missing, is not a regular file, or begins like a file of another kind.
    """
    file = at_home(path)
    try:
        if (mode := file.stat().st_mode) and not stat.S_ISREG(mode):
            what = (
                "Is a directory"
                if stat.S_ISDIR(mode)
                else "a pipe or device, which cannot be read twice"
            )
            raise InputError(
                f"{file.absolute()}: cannot be read ({what}); check {keys}, which must name a file"
            )
        with open(file, "rb") as found:
            if kind := kind_refused(found.read(HEAD_BYTES)):
                raise InputError(f"{file.absolute()}: the file {kind}; check {keys}")
            found.seek(0)
            yield found
    except FileNotFoundError:
        raise InputError(f"{file.absolute()}: no such file; check {keys}") from None
    except OSError as error:
        raise InputError(
            f"{file.absolute()}: cannot be read ({error.strerror}); check {keys}"
        ) from None
