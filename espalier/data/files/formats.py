"""Formats of record files, by the ending of a file's name, and the files that a path names."""

import os
from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path

from espalier.data.files.delimited import DelimitedRows
from espalier.data.files.files import JsonArrayRows, JsonLinesRows, TextRows, opened
from espalier.data.files.rows import RowFile
from espalier.data.files.tables import (
    ArrowFileRows,
    ParquetRows,
    SavedDatasetRows,
    no_splits,
)
from espalier.environment.paths import at_home
from espalier.errors import InputError

PACKED = (".gz", ".zst")
"""Endings of compressed files; the ending before it gives the format."""
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that ``datasets`` saved; one of them is there."""


def _json(path: str, keys: str) -> RowFile:
    """Return the rows of a JSON file: an array, or JSON Lines."""
    with opened(path, keys) as file:
        begins_array = file.head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return JsonArrayRows(path, keys) if begins_array else JsonLinesRows(path, keys)


Reader = Callable[[str, str], RowFile]
"""Function of a path and of the settings that name it."""

FORMATS: dict[str, Reader] = {
    ".jsonl": JsonLinesRows,
    ".ndjson": JsonLinesRows,
    ".json": _json,
    ".csv": lambda path, keys: DelimitedRows(path, keys, ",;\t|"),
    ".tsv": lambda path, keys: DelimitedRows(path, keys, "\t"),
    ".parquet": ParquetRows,
    ".arrow": ArrowFileRows,
    ".feather": ArrowFileRows,
}
"""Readers by the ending of a name; files with other endings are text."""


def ending_of(path: str) -> str:
    """Return the ending of a file's name that gives its format, without that of a compression."""
    file = Path(path.lower())
    return (file.with_suffix("") if file.suffix in PACKED else file).suffix


def open_rows(path: str, keys: str, split: str = "", other: Reader = TextRows) -> list[RowFile]:
    """Return the files that a path names, in order of their names.

    Raises InputError if there is no such file, the files have different formats, or a split is
    named and they have none.

    Parameters
    ----------
    path : a file, a folder of files, a folder that ``datasets`` saved, or a pattern with ``*``
    keys : settings that name the path, for errors
    split : split of a saved dataset that has several; empty: ``train``
    other : reader of files whose ending names no format
    """
    place = at_home(path)
    try:
        return _files_at(place, path, keys, split, other)
    except OSError as error:
        raise InputError(
            f"{place.absolute()}: cannot be read ({error.strerror}); check {keys}, and what the"
            " account may read"
        ) from None


def _files_at(place: Path, path: str, keys: str, split: str, other: Reader) -> list[RowFile]:
    if place.is_dir() and any((place / name).is_file() for name in SAVED):
        return [SavedDatasetRows(path, keys, split)]
    if split:
        raise no_splits(path, split)
    if place.is_dir():
        found = [file for file in place.iterdir() if not file.is_dir()]
    elif has_magic(str(place)) and not place.exists():
        _require_listable(place)
        found = [Path(name) for name in glob(str(place), recursive=True) if not Path(name).is_dir()]
    else:
        return [_rows_of(path, keys, other)]
    names = sorted(str(file) for file in found if not file.name.startswith("."))
    if not names:
        raise InputError(
            f"{place.absolute()}: names no files; check {keys}; a pattern with '**/*' also names"
            " those of subfolders"
        )
    require_one_format(names, path, keys)
    files = [_rows_of(name, keys, other) for name in names]
    for file in files:
        file.is_one_of_many = len(files) > 1
    return files


def _require_listable(pattern: Path) -> None:
    """Raise OSError if the files of the folder where a pattern begins cannot be listed."""
    folder = next(parent for parent in pattern.parents if not has_magic(str(parent)))
    if folder.is_dir():
        os.scandir(folder).close()


def _rows_of(path: str, keys: str, other: Reader) -> RowFile:
    return FORMATS.get(ending_of(path), other)(path, keys)


def require_one_format(names: Sequence[str], path: str, keys: str) -> None:
    """Refuse files with different formats."""
    endings = {ending_of(name) for name in names}
    if len({FORMATS.get(ending) for ending in endings}) > 1:
        known = sorted(endings & FORMATS.keys())
        shown = known + ["text"] * (len(known) < len(endings))
        raise InputError(
            f"{path}: the files have different formats ({', '.join(shown)}); name those that"
            f" belong to the data, for example with a pattern ('*{shown[0]}') in {keys}"
        )
