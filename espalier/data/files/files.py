"""Rows of text and JSON files, plain or compressed, read block by block.

Errors name the file, the line and the field, and never quote the text.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.data.files.compression import Bytes
from espalier.data.files.file_kinds import kind_refused
from espalier.data.files.records import TO_UTF8, json_array, json_object, kind_of
from espalier.data.files.rows import Place, Row, RowFile
from espalier.data.passages import BLANK, full_parts, parts
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.progress import PercentDone

CLIENT_KEYS = "data.path or the node's data-path"
"""Settings that name a client's file."""

BLOCK_BYTES = 1 << 22
"""Number of bytes that are read at a time; only a longer line of JSON Lines needs more memory."""

MAX_WHOLE_BYTES = 1 << 28
"""Maximum size of what is read whole: a JSON array, a line of JSON Lines, a run of blanks."""

_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"[^"\n]*"\s*:')
"""Beginning of JSON: an object, or an array of objects."""
_BLANK_LINES = re.compile(rb"\n(?:[ \t]*\r?\n)+")


class TextRows(RowFile):
    """Passages of a UTF-8 file; each is a record with the field ``text``."""

    CONTENT = "text"

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        with opened(self.path, self.keys) as file:
            require_text(file)
            for start, data in _between_blank_lines(file):
                try:
                    text = text_of_bytes(data)
                except UnicodeDecodeError as error:
                    raise not_utf8(self.path, start, error) from None
                if text:
                    yield Row((start, len(data)), f"{self.path}: byte {start}", {"text": text})

    def at(self, places: Iterable[Place], columns: Sequence[str] = ()) -> Iterator[Mapping]:
        return _at(self, places, lambda data: {"text": text_of_bytes(data)})


class JsonLinesRows(RowFile):
    """Objects of a JSON Lines file; blank lines are skipped."""

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        with opened(self.path, self.keys) as file:
            for number, (start, line) in enumerate(_lines(file), start=1):
                if line.strip():
                    where = f"{self.path}: line {number}"
                    yield Row((start, len(line)), where, json_object(line, where))

    def at(self, places: Iterable[Place], columns: Sequence[str] = ()) -> Iterator[Mapping]:
        return _at(self, places, lambda data: json_object(data, self.path))


class JsonArrayRows(RowFile):
    """Objects of a JSON file that is one array; it is read whole."""

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        with opened(self.path, self.keys) as file:
            file.skip_mark()
            data = bytearray()
            for block in blocks(file):
                data += block
                if len(data) > MAX_WHOLE_BYTES:
                    raise InputError(
                        f"{self.path}: a JSON array of more than {MAX_WHOLE_BYTES} bytes; write it"
                        " as JSON Lines, which are read line by line (jq -c '.[]')"
                    )
        for number, record in enumerate(json_array(bytes(data), self.path)):
            where = f"{self.path}: element {number + 1} of the array"
            if not isinstance(record, dict):
                raise InputError(
                    f"{where} is not a JSON object but {kind_of(record)}; write an array of objects"
                )
            yield Row((number, 0), where, record)


def _at(
    rows: RowFile, places: Iterable[Place], parse: Callable[[bytes], Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield the records at ascending places of a file, each read by its bytes.

    A compressed file is unpacked from its beginning.
    """
    with opened(rows.path, rows.keys) as file:
        if file.packed:
            # Offsets count unpacked bytes, so the rows are read from the beginning.
            yield from RowFile.at(rows, places)
            return
        for start, length in places:
            try:
                record = parse(os.pread(file.file.fileno(), length, start))
            except (EspalierError, ValueError):
                # The file was replaced. The error must not describe content that nobody checked.
                raise rows.changed() from None
            yield record


def text_of_bytes(data: bytes) -> str:
    """Return the text of a passage of a text file.

    Raises UnicodeDecodeError if the bytes are not UTF-8.
    """
    return data.decode().replace("\r\n", "\n").strip("\n").rstrip()


def _between_blank_lines(file: Bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the passages of a file with the offset of each.

    A byte order mark is left out. A very long passage is cut even before its end is read. A blank
    line has only spaces and tabs. Lines end with a newline, which may follow a carriage return.
    """
    # A newline in front lets the pattern find blank lines at the beginning of the file.
    waiting = bytearray(b"\n")
    start = file.skip_mark() - 1
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
        _require_short(file, start, waiting, "blank space", "remove it")
    yield from (
        (start + first, bytes(waiting[first:end])) for first, end in parts(waiting, 1, len(waiting))
    )


def blocks(file: Bytes) -> Iterator[bytes]:
    """Yield the rest of a file in blocks and report progress.

    Raises InputError if a byte is NUL, which does not occur in text.
    """
    percent = PercentDone(f"reading {Path(file.name).name}", file.progress()[1])
    while block := file.read(BLOCK_BYTES):
        if (place := block.find(0)) >= 0:
            raise InputError(
                f"{file.name}: byte {file.tell() - len(block) + place} is NUL: the file is not"
                " text, not in UTF-8, or damaged; write it again as UTF-8 text without NUL"
                " bytes"
            )
        percent(file.progress()[0])
        yield block


def _lines(file: Bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, with their line ends, and the offset of each.

    Raises InputError if a line is longer than ``MAX_WHOLE_BYTES``.
    """
    start = 0
    waiting = bytearray()
    for block in blocks(file):
        before = max(0, len(waiting) - 1)
        waiting += block
        # A line that ends with a carriage return may go on: its newline can be in the next block.
        end = max(waiting.rfind(b"\n", before), waiting.rfind(b"\r", before, -1)) + 1
        for line in bytes(waiting[:end]).splitlines(keepends=True):
            yield start, line
            start += len(line)
        del waiting[:end]
        _require_short(file, start, waiting, "a line", "write one JSON object per line")
    for line in bytes(waiting).splitlines(keepends=True):
        yield start, line
        start += len(line)


def _require_short(file: Bytes, start: int, waiting: bytearray, what: str, remedy: str) -> None:
    """Refuse a part of a file that must be read whole and is too long."""
    if len(waiting) > MAX_WHOLE_BYTES:
        raise InputError(
            f"{file.name}: at byte {start} begins {what} of more than {MAX_WHOLE_BYTES} bytes;"
            f" {remedy}"
        )


def require_text(file: Bytes) -> None:
    """Raise InputError if a text file begins like JSON, whose syntax nobody wants to train on."""
    if _JSON.match(file.head):
        raise InputError(
            f"{file.name}: begins like JSON, not like text; for records, the name of the file must"
            " end with .jsonl or .json, which .gz or .zst may follow"
        )


def not_utf8(path: str, start: int, error: UnicodeDecodeError) -> EspalierError:
    """Return the error for bytes from offset ``start`` on that could not be decoded."""
    return InputError(
        f"{path}: byte {start + error.start} is not UTF-8; {TO_UTF8}; if the file is cut off there,"
        " copy it again"
    )


def no_such_file(file: Path, keys: str) -> EspalierError:
    """Return the error for a file that does not exist; ``keys`` are the settings that name it."""
    return InputError(f"{file.absolute()}: no such file; check {keys}")


@contextmanager
def opened(path: str, keys: str) -> Iterator[Bytes]:
    """Open a file of UTF-8 text for reading.

    Raises InputError if the file is missing, is not a regular file, or begins like a file of
    another kind.

    Parameters
    ----------
    keys : settings that name the file, for errors
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
            unpacked = Bytes(found)
            if kind := kind_refused(unpacked.head):
                raise InputError(f"{file.absolute()}: the file {kind}; check {keys}")
            yield unpacked
    except FileNotFoundError:
        raise no_such_file(file, keys) from None
    except OSError as error:
        raise InputError(
            f"{file.absolute()}: cannot be read ({error.strerror}); check {keys}"
        ) from None
