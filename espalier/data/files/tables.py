"""Rows of tables: Parquet, Arrow, and folders that ``datasets`` saved.

Memory holds a few hundred rows at a time, and of a Parquet file a part of a row group.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.files.compression import (
    GZIP,
    HEAD_BYTES,
    ZSTANDARD,
    import_library,
)
from espalier.data.files.file_kinds import UNPACK, kind_refused
from espalier.data.files.files import no_such_file
from espalier.data.files.records import NAME
from espalier.data.files.rows import ClassNumber, Place, PlaceCursor, Row, RowFile, status_of
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, first_line

ROWS_AT_ONCE = 256
"""Number of rows that are converted to Python values at a time."""
PARQUET_BUFFER = 1 << 20
"""Number of bytes of a column of a Parquet file that are read at a time."""
ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file."""
ARROW_STREAM = b"\xff\xff\xff\xff"
"""First bytes of an Arrow stream."""
SPLITS = "dataset_dict.json"
"""File of a folder that ``datasets`` saved with several splits; it names them."""

Batch = tuple[int, Any]
"""Number of the first row, from 0, and a ``pyarrow.RecordBatch``."""


class _ColumnValues:
    """Columns of a batch, each of which is converted to Python values when it is first needed."""

    def __init__(self, names: tuple[str, ...], values_of: Callable[[str], list[Any]]) -> None:
        self.names = names
        self._values_of = values_of
        self._converted: dict[str, list[Any]] = {}

    def of(self, name: str) -> list[Any]:
        """Return the values of a column. Raises InputError if they cannot be converted."""
        if name not in self._converted:
            self._converted[name] = self._values_of(name)
        return self._converted[name]


class _TableRecord(Mapping[str, Any]):
    """Row of a batch; a column that nobody reads costs nothing, and may be unreadable."""

    def __init__(self, values: _ColumnValues, number: int) -> None:
        self._columns = values
        self._number = number

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns.names:
            raise KeyError(name)
        return self._columns.of(name)[self._number]

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


class ArrowRows(RowFile):
    """Rows of a table that pyarrow reads in batches."""

    MARKS: ClassVar[tuple[bytes, ...]] = ()
    """First bytes of files of the format."""

    @abstractmethod
    def batches(self, columns: Sequence[str], cursor: PlaceCursor | None) -> Iterator[Batch]:
        """Yield the number of the first row and the rows of each batch, in file order.

        Parameters
        ----------
        columns : the only columns to read; empty: all
        cursor : places of the only rows that are needed; None: all
        """

    def read(self, columns: Sequence[str]) -> Iterator[Row]:
        for first, batch in self._checked(columns, None):
            for number, record in enumerate(self._records(first, batch), start=first):
                yield Row((number, 0), f"{self.path}: row {number + 1}", record)

    def at(self, places: Iterable[Place], columns: Sequence[str] = ()) -> Iterator[Mapping]:
        cursor = PlaceCursor(places)
        for first, batch in self._checked(columns, cursor):
            # ``batches`` may look at the next place, so it must be beyond this batch afterwards.
            if chosen := cursor.take_before(first + batch.num_rows):
                begin = chosen[0]
                part = batch.slice(begin - first, chosen[-1] + 1 - begin)
                records = self._records(begin, part)
                yield from (records[number - begin] for number in chosen)
            if cursor.next is None:
                return
        if cursor.next is not None:
            raise self.changed()

    def _checked(self, columns: Sequence[str], cursor: PlaceCursor | None) -> Iterator[Batch]:
        """Yield batches; errors of the libraries become errors that name the file."""
        try:
            yield from self.batches(columns, cursor)
        except EspalierError:
            raise
        # The libraries raise errors of many types for damaged files.
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not at_home(self.path).exists():
                raise no_such_file(at_home(self.path), self.keys) from None
            if kind := self._other_kind():
                raise InputError(f"{self.shown()}: the file {kind}; check {self.keys}") from None
            raise self._unreadable("", error) from None

    def _records(self, first: int, batch: Any) -> list[Mapping[str, Any]]:
        """Return rows, the first of which has the number ``first``."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))

        def values_of(name: str) -> list[Any]:
            try:
                # Wrong offsets of a damaged file that is mapped into memory would end the process.
                columns[name].validate(full=True)
                return self._values(name, columns[name])
            # Bytes that are not UTF-8, times that Python does not have, and the like.
            except Exception as error:
                field = f", field '{name}'" if NAME.fullmatch(name) else ""
                rows = f" rows {first + 1} to {first + batch.num_rows}{field}:"
                raise self._unreadable(rows, error) from None

        values = _ColumnValues(tuple(columns), values_of)
        return [_TableRecord(values, number) for number in range(batch.num_rows)]

    def _values(self, name: str, column: Any) -> list[Any]:
        """Return the values of a column of a batch as Python values."""
        values: list[Any] = column.to_pylist()
        return values

    def _unreadable(self, where: str, error: Exception) -> EspalierError:
        return InputError(
            f"{self.shown()}:{where} cannot be read ({type(error).__name__}: {first_line(error)});"
            " copy or export the file again, give it the ending of its format, or check"
            f" {self.keys}"
        )

    def _other_kind(self) -> str:
        """Return the kind of a file that holds no table; empty if its first bytes tell none."""
        # A dataset is no file.
        with suppress(OSError), open(at_home(self.path), "rb") as file:
            head = file.read(HEAD_BYTES)
            if head.startswith((GZIP, ZSTANDARD)):
                return UNPACK.format("gzip or Zstandard")
            return "" if head.startswith(self.MARKS) else kind_refused(head)
        return ""


class ParquetRows(ArrowRows):
    """Rows of a Parquet file; row groups without needed rows are skipped."""

    MARKS = (b"PAR1",)

    def batches(self, columns: Sequence[str], cursor: PlaceCursor | None) -> Iterator[Batch]:
        parquet = import_library("pyarrow.parquet")
        with parquet.ParquetFile(
            at_home(self.path), pre_buffer=False, buffer_size=PARQUET_BUFFER
        ) as file:
            self.require_columns(columns, file.schema_arrow.names)
            first = 0
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if cursor is None or (cursor.next is not None and cursor.next[0] < end):
                    for batch in file.iter_batches(
                        ROWS_AT_ONCE, [group], columns or None, use_threads=False
                    ):
                        yield first, batch
                        first += batch.num_rows
                first = end


class ArrowFileRows(ArrowRows):
    """Rows of an Arrow file or stream, mapped into memory."""

    MARKS = (ARROW_FILE, ARROW_STREAM)

    def batches(self, columns: Sequence[str], cursor: PlaceCursor | None) -> Iterator[Batch]:
        pyarrow = import_library("pyarrow")
        ipc = import_library("pyarrow.ipc")
        with pyarrow.memory_map(str(at_home(self.path))) as source:
            is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
            source.seek(0)
            if is_file:
                file = ipc.open_file(source)
                found = map(file.get_batch, range(file.num_record_batches))
            else:
                file = ipc.open_stream(source)
                found = iter(file)
            self.require_columns(columns, file.schema.names)
            yield from _sliced(batch.select(columns) if columns else batch for batch in found)


class DatasetRows(ArrowRows):
    """Rows of a dataset of the library ``datasets``, mapped into memory.

    The numbers of a column of the type ``ClassLabel`` are ``ClassNumber``.
    """

    _labels: Mapping[str, tuple[str, ...]] = {}
    """Names of the labels by column."""

    @abstractmethod
    def dataset(self) -> Any:
        """Open the dataset, a ``datasets.Dataset``."""

    def batches(self, columns: Sequence[str], cursor: PlaceCursor | None) -> Iterator[Batch]:
        found = self._opened(columns)
        if not len(found):
            return
        if cursor is None:
            tables = found.iter(ROWS_AT_ONCE)
            yield from _sliced(batch for table in tables for batch in table.to_batches())
            return
        # The caller takes the places in a batch, so ``cursor.next`` is behind it afterwards.
        while cursor.next is not None:
            first = cursor.next[0]
            table = found[first : first + ROWS_AT_ONCE]
            # The dataset has fewer rows than before; ``at`` reports it.
            if not table.num_rows:
                return
            yield first, table

    def _values(self, name: str, column: Any) -> list[Any]:
        values = super()._values(name, column)
        if (labels := self._labels.get(name)) is None:
            return values
        return [value if value is None else ClassNumber(value, labels) for value in values]

    def _opened(self, columns: Sequence[str]) -> Any:
        found = self.dataset()
        self.require_columns(columns, found.column_names)
        self._labels = {
            name: tuple(feature.names)
            for name, feature in found.features.items()
            if hasattr(feature, "names") and hasattr(feature, "int2str")
        }
        return (found.select_columns(list(columns)) if columns else found).with_format("arrow")


class SavedDatasetRows(DatasetRows):
    """Rows of a folder that ``datasets.Dataset.save_to_disk`` wrote.

    Parameters
    ----------
    split : split of a folder with several; empty: ``train``
    """

    def __init__(self, path: str, keys: str, split: str) -> None:
        super().__init__(path, keys)
        self._split = split

    def dataset(self) -> Any:
        folder = at_home(self.path)
        splits = folder / SPLITS
        if splits.is_file():
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            if (split := self._split or "train") not in names:
                raise InputError(
                    f"{self.path}: the saved dataset has no split '{split}', only"
                    f" {', '.join(names)}; name the folder of a split, {self.path}/NAME (in a"
                    " simulation also with data.hub-split)"
                )
            folder /= split
        elif self._split:
            raise no_splits(self.path, self._split)
        # ``datasets`` saves an empty dataset without files, and cannot load it.
        if not json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
            raise self.empty()
        return import_library("datasets").load_from_disk(str(folder))

    def identity(self) -> str:
        folder = super().identity()
        has_splits = (Path(folder) / SPLITS).is_file()
        return str(Path(folder) / (self._split or "train")) if has_splits else folder

    def state(self) -> list[int]:
        """Return the properties of the folder's files that reveal a change."""
        files = sorted(file for file in at_home(self.path).rglob("*") if file.is_file())
        return [number for file in files for number in status_of(file)]


def no_splits(path: str, split: str) -> EspalierError:
    """Return the error for data in files that are not divided into splits."""
    return InputError(f"data.hub-split = '{split}': {path} has no splits; leave it out")


def _sliced(batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield batches in slices of at most ``ROWS_AT_ONCE`` rows, with their first rows' numbers."""
    first = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            part = batch.slice(start, ROWS_AT_ONCE)
            yield first, part
            first += part.num_rows
