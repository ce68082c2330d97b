"""Text and JSON Lines files, read in blocks; errors name the file, the line and the field, and never quote the text."""

import codecs
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from espalier.corpora.file_kinds import HEAD_BYTES, kind_refused
from espalier.corpora.json_line import TO_UTF8, json_object
from espalier.corpora.json_values import fields_there, is_label, kind_of
from espalier.corpora.long_passages import BLANK, full_parts, parts
from espalier.corpora.records import Record
from espalier.pace.beats import Share
from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake

CLIENT_KEYS = "data.path or the node's data-path"
"""The settings that name a client's file."""

BLOCK_BYTES = 1 << 22
"""So much of a file is read at a time; more is in memory only of a line of JSON Lines that is longer."""

_BLANK_LINES = re.compile(rb"\n(?:[ \t]*\r?\n)+")


@dataclass(frozen=True)
class Located:
    """A record, and the bytes of the file from which ``text_record`` or ``json_record`` makes it."""

    start: int
    length: int
    record: Record


def text_records(path: str) -> Iterator[Located]:
    """Yield the passages of a UTF-8 file in their order.

    Raises
    ------
    Mistake
        The file is missing, is not a file, is empty, or is not UTF-8 text.
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
        raise Mistake(f"{path}: the file is empty; name a file with text in it")


def text_record(data: bytes) -> Record:
    """What stands between two blank lines of a text file, or a part of it; UnicodeDecodeError if it is not UTF-8."""
    return Record(data.decode().replace("\r\n", "\n").strip("\n").rstrip())


def json_records(path: str, field: str, label_field: str) -> Iterator[Located]:
    """Yield a text field and a label field of every record of a JSON Lines file; blank lines are passed over.

    Labels may be strings, numbers or truth values; without a ``label_field`` every label is empty.

    Raises
    ------
    Mistake
        The file is missing, empty or no UTF-8 text, a line is not a JSON object, the field is missing or not a string, or the
        label is missing.
    """
    for where, start, line in json_lines(path):
        yield Located(start, len(line), json_record(line, field, label_field, where))


def json_lines(path: str, keys: str = CLIENT_KEYS) -> Iterator[tuple[str, int, bytes]]:
    """Yield the lines of a JSON Lines file that are not blank: where each stands in words, its first byte, and its bytes.

    Raises
    ------
    Mistake
        The file is missing, is not a file, holds no records, or is no text. ``keys`` are the settings to blame.
    """
    found = False
    with opened(path, keys) as file:
        for number, (start, line) in enumerate(_lines(file), start=1):
            if line.strip():
                found = True
                yield f"{path}: line {number}", start, line
    if not found:
        raise Mistake(f"{path}: the file is empty; name a file with records in it")


def json_record(line: bytes, field: str, label_field: str, where: str) -> Record:
    """The record of one line; raises as ``json_records`` does, and says ``where`` it stands."""
    record = json_object(line, where)
    remedy = "set data.field or the node's data-field"
    if field not in record:
        raise Mistake(f"{where} has no field '{field}', {fields_there(record)}; {remedy}")
    if not isinstance(record[field], str):
        raise Mistake(
            f"{where}, field '{field}' is not a string but {kind_of(record[field])}; write it as"
            f" one, or {remedy}"
        )
    if not _is_unicode(record[field]):
        raise Mistake(
            f"{where}, field '{field}' holds half of a surrogate pair; write the file again as"
            " UTF-8"
        )
    return Record(record[field], _label(record, label_field, where))


def _label(record: dict[str, Any], field: str, where: str) -> str:
    if not field:
        return ""
    if field not in record:
        raise Mistake(
            f"{where} has no label in field '{field}', {fields_there(record)}; set"
            " data.partition-field"
        )
    if not is_label(value := record[field]):
        raise Mistake(
            f"{where} has no label in field '{field}' but {kind_of(value)}; a label is a string, a"
            " number or a truth value: give the record one, or set data.partition-field"
        )
    return str(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _between_blank_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield what stands between blank lines of a file, and at which byte; a mark of the byte order is left out.

    What is very long is cut, also while its end is not read yet (``long_passages.py``). A blank line has nothing but spaces and
    tabs. Lines end in a newline, with a carriage return before it or not.
    """
    # As if the first line stood behind another.
    waiting = bytearray(b"\n")
    start = behind_mark(file) - 1
    seen = 0  # before here no blank lines begin that were not found
    for block in blocks(file):
        waiting += block
        place = 0  # of the byte before what was not yielded yet
        for blank in _BLANK_LINES.finditer(waiting, seen):
            if blank.start() > place:
                yield from (
                    (start + first, bytes(waiting[first:end]))
                    for first, end in parts(waiting, place + 1, blank.start())
                )
            place = blank.end() - 1  # its last newline stands before what follows
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
    """Pass over a mark of the byte order at the beginning of a file; returns where the text begins."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    return file.seek(start)


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Read a file on, and say how far that is; Mistake if there is a byte that text does not have."""
    share = Share(f"reading {Path(file.name).name}", os.fstat(file.fileno()).st_size)
    while block := file.read(BLOCK_BYTES):
        if (place := block.find(0)) >= 0:
            raise Mistake(
                f"{file.name}: byte {file.tell() - len(block) + place} is NUL: the file is no text,"
                " not in UTF-8, or damaged; write it again as UTF-8 text without NUL bytes"
            )
        share(file.tell())
        yield block


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with what ends them, and at which byte each begins."""
    start = 0
    waiting = b""
    for block in blocks(file):
        lines = (waiting + block).splitlines(keepends=True)
        # A carriage return may be half of what ends a line.
        waiting = b"" if lines[-1].endswith(b"\n") else lines.pop()
        for line in lines:
            yield start, line
            start += len(line)
    for line in waiting.splitlines(keepends=True):
        yield start, line
        start += len(line)


def not_utf8(path: str, start: int, error: UnicodeDecodeError) -> Mistake:
    """Return the error of a file whose bytes from ``start`` on could not be decoded."""
    place = start + error.start
    if error.reason == "unexpected end of data":
        return Mistake(
            f"{path}: byte {place} is not UTF-8: the text ends within a character; copy the file"
            " again"
        )
    return Mistake(f"{path}: byte {place} is not UTF-8; {TO_UTF8}")


@contextmanager
def opened(path: str, keys: str) -> Iterator[BinaryIO]:
    """A file of UTF-8 text, to be read; ``keys`` are the settings to blame if it cannot be.

    Raises
    ------
    Mistake
        It is missing, is no file, or begins as a file of another kind does.
    """
    file = at_home(path)
    try:
        if (mode := file.stat().st_mode) and not stat.S_ISREG(mode):
            what = (
                "Is a directory"
                if stat.S_ISDIR(mode)
                else "a pipe or device, which cannot be read twice"
            )
            raise Mistake(
                f"{file.absolute()}: cannot be read ({what}); check {keys}: it takes a file"
            )
        with open(file, "rb") as found:
            if kind := kind_refused(found.read(HEAD_BYTES)):
                raise Mistake(f"{file.absolute()}: the file {kind}; check {keys}")
            found.seek(0)
            yield found
    except FileNotFoundError:
        raise Mistake(f"{file.absolute()}: no such file; check {keys}") from None
    except OSError as error:
        raise Mistake(
            f"{file.absolute()}: cannot be read ({error.strerror}); check {keys}"
        ) from None
