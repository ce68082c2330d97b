"""Rows of CSV and TSV files: their delimiter, their header and their quotes."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from espalier.amounts import count
from espalier.data.files.compression import Bytes
from espalier.data.files.files import blocks, not_utf8, opened
from espalier.data.files.records import FirstLineNamed
from espalier.data.files.rows import Row, RowFile
from espalier.errors import EspalierError, InputError

MAX_CELL = 1 << 24
"""Maximum size of a cell of a CSV file in characters.

A quote that does not end would otherwise take the rest of the file into one cell.
"""
MAX_HEADER = 1 << 16
"""Number of bytes in which the delimiters of a header are looked for."""
QUOTE = "quote fields that contain the delimiter, a quote or a line end"
_QUOTED = re.compile(rb'"[^"]*"')
_NAMED = re.compile(rb'(?:\xef\xbb\xbf)?(?i:"?sep=([,;\t|])"?) *\r?\n')
"""First line by which Excel tells the delimiter."""


class DelimitedRows(RowFile):
    """Rows of a CSV or TSV file with a header; every value is a string.

    Blank space around the names of columns is ignored.

    Parameters
    ----------
    delimiters : characters that may separate fields, the likeliest first
    """

    CONTENT = "a header and records"

    def __init__(self, path: str, keys: str, delimiters: str) -> None:
        super().__init__(path, keys)
        self._delimiters = delimiters

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        csv.field_size_limit(MAX_CELL)
        with opened(self.path, self.keys) as file:
            parts = blocks(file)
            head = next(parts, b"")
            if next(parts, b""):
                # The last line of a part may be incomplete.
                head = head.rpartition(b"\n")[0]
        named = _NAMED.match(head)
        delimiter = named[1].decode() if named else self._delimiter(head, columns)
        with opened(self.path, self.keys) as file:
            lines = _Lines(_lines(file))
            if named:
                next(lines)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            skipped = 1 if named else 0
            header = self._header(reader, skipped)
            if not header:
                return
            self.require_columns(columns, header, of_first_line=True)
            alone = (
                "" if len(header) > 1 else f" (one field, without {self._signs()} in the header)"
            )
            lines.forget()
            for number, cells in enumerate(self._cells(reader, skipped)):
                where = f"{self.path}: row {number + 1}{alone}"
                if len(cells) != len(header):
                    raise InputError(
                        f"{where} has {count(len(cells), 'field')}, the header has {len(header)};"
                        f" {QUOTE}"
                    )
                if delimiter == "\t" and lines.are_whole_rows(len(header)):
                    raise self._rows_joined(where)
                record = FirstLineNamed(zip(header, cells, strict=True))
                yield Row((number, 0), where, record)
                lines.forget()

    def _rows_joined(self, where: str) -> EspalierError:
        """Return the error for lines that are rows each, and one row by their quotes."""
        return InputError(
            f"{where} goes on over several lines by its quotes, but each of these lines has as many"
            " fields as the header; if they are rows of their own, double their quotes and put the"
            " field in quotes; if they are one row, write the table as CSV, JSON Lines or Parquet"
        )

    def _delimiter(self, head: bytes, columns: Sequence[str]) -> str:
        """Return the delimiter with which the header and the first row have as many fields.

        Of several, it is the first one with which the header has all ``columns``. If there is none,
        or ``head``, whole lines, does not have the first row, it is the first one in the header.
        """
        head = head.lstrip(b"\r\n")
        header = _QUOTED.sub(b"", head[:MAX_HEADER]).partition(b"\n")[0].decode(errors="replace")
        found = [sign for sign in self._delimiters if sign in header]
        lines = [line for line in head.decode(errors="replace").split("\n") if line.strip()]
        fitting = list[str]()
        for sign in found if len(found) > 1 else ():
            rows = csv.reader(lines, delimiter=sign)
            with suppress(csv.Error, StopIteration):
                names = [name.strip().lstrip("\ufeff") for name in next(rows)]
                if len(names) == len(next(rows)):
                    fitting.append(sign)
                    if set(columns) <= set(names):
                        return sign
        return next(iter(fitting or found), self._delimiters[0])

    def _signs(self) -> str:
        return " ".join("tab" if sign == "\t" else sign for sign in self._delimiters)

    def _header(self, reader: Iterator[list[str]], skipped: int) -> list[str]:
        return [name.strip() for name in next(self._cells(reader, skipped), ())]

    def _cells(self, reader: Iterator[list[str]], skipped: int) -> Iterator[list[str]]:
        """Yield the rows that are not blank; ``skipped`` lines were read before."""
        first = 1 + skipped
        try:
            for cells in reader:
                first = getattr(reader, "line_num", 0) + 1 + skipped
                if cells:
                    yield cells
        except csv.Error as error:
            raise self._not_a_table(first, error) from None

    def _not_a_table(self, line: int, error: csv.Error) -> EspalierError:
        """Return the error for the row that begins on a line."""
        why, remedy = str(error), f"{QUOTE}, and double quotes within them"
        if "new-line character" in why:
            why, remedy = "a line ends with a carriage return alone", "end lines with \\n or \\r\\n"
        elif "field larger" in why or "unexpected end" in why:
            why = f"a field does not end within the file or {MAX_CELL:,} characters"
        kind = "CSV" if "," in self._delimiters else "TSV"
        return InputError(f"{self.path}: line {line} is not {kind}: {why}; {remedy}")


class _Lines:
    """Lines of a file, of which those since ``forget`` are kept."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._kept: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._kept.append(line)
        return line

    def forget(self) -> None:
        """Forget the lines so far."""
        self._kept = []

    def are_whole_rows(self, num_fields: int) -> bool:
        """Return whether several lines are kept, each with the tabs of a row.

        A table of one column has no tabs, so its lines tell nothing.
        """
        tabs = [line.count("\t") for line in self._kept if line.strip()]
        return len(tabs) > 1 and num_fields > 1 and set(tabs) == {num_fields - 1}


def _lines(file: Bytes) -> Iterator[str]:
    """Yield the decoded lines of a file, with their ends."""

    def decoded(line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(file.name, start, error) from None

    incomplete = b""
    start = file.skip_mark()
    for block in blocks(file):
        # The rest of the last line may be in the next block.
        *lines, incomplete = (incomplete + block).split(b"\n")
        for line in lines:
            yield decoded(line + b"\n")
            start += len(line) + 1
    if incomplete:
        yield decoded(incomplete)
