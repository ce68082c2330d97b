"""Damaged files, and files of wrong formats: they are named and not quoted."""

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from tests.data.files.written_files import (
    FORMATS,
    RECORDS,
    SECRET,
    pyarrow,
    shares,
    write_arrow,
    write_parquet,
    write_parts,
)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def written_arrow(path: Path, columns: list[Any], names: list[str]) -> None:
    table = pyarrow.table(columns, names=names)
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def with_wrong_offset(path: Path) -> None:
    """Write a table of which a text seems to end far behind the file.

    Read as it is, it would end the process.
    """
    offsets = pyarrow.array([0, 1, (1 << 31) - 1, 3], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, offsets, pyarrow.py_buffer(b"abc")]
    )
    written_arrow(path, [text], ["text"])


WRONG: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "latin-1": (
        "a.csv",
        lambda path: path.write_bytes("text\nné\n".encode("latin-1")),
        "byte 6 is not UTF-8.*Latin-1",
    ),
    "utf-16": (
        "a.csv",
        lambda path: path.write_bytes("text\nné\n".encode("utf-16")),
        "the file is UTF-16, not UTF-8",
    ),
    "one field more": (
        "a.csv",
        lambda path: path.write_text(f"text,b\na,b\n{SECRET},b,c\n"),
        "row 2 has 3 fields, the header has 2",
    ),
    "an open quote": (
        "a.csv",
        lambda path: path.write_text(f'text\na\n"{SECRET}\nb\nc\n'),
        "line 3 is not CSV: a field does not end within the file",
    ),
    "carriage returns": (
        "a.csv",
        lambda path: path.write_bytes(f"text\r{SECRET}\rb\r".encode()),
        "a line ends with a carriage return alone; end lines with",
    ),
    "a key twice": (
        "a.jsonl",
        lambda path: path.write_text(f'{{"text": "a"}}\n{{"text": "b", "text": "{SECRET}"}}\n'),
        "line 2: an object has the same key twice; rename",
    ),
    "a key of an element twice": (
        "a.json",
        lambda path: path.write_text(f'[{{"text": "b", "text": "{SECRET}"}}]'),
        "an object has the same key twice; rename",
    ),
    "two names": (
        "a.csv",
        lambda path: path.write_text("text,text\na,b\n"),
        "columns 1 and 2 have the same name",
    ),
    "two names in arrow": (
        "a.arrow",
        lambda path: written_arrow(path, [["a"], ["b"]], ["text", "text"]),
        "columns 1 and 2 have the same name",
    ),
    "latin-1 in arrow": (
        "a.arrow",
        lambda path: written_arrow(
            path,
            [pyarrow.array([f"{SECRET} é".encode("latin-1")]).view(pyarrow.string())],
            ["text"],
        ),
        r"rows 1 to 1, field 'text': cannot be read \(ArrowInvalid: Invalid UTF8",
    ),
    "wrong offsets in arrow": (
        "a.arrow",
        lambda path: with_wrong_offset(path),
        r"field 'text': cannot be read \(ArrowInvalid: Offset invariant failure",
    ),
    "parquet in arrow": (
        "a.arrow",
        lambda path: write_parquet(path, RECORDS),
        "the file is a Parquet file; its name must end with .parquet",
    ),
    "the first feather": (
        "a.feather",
        lambda path: path.write_bytes(b"FEA1" + bytes(60)),
        "the file has the format Feather, version 1",
    ),
    "a pointer": (
        "a.parquet",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "the file is a Git LFS pointer",
    ),
    "a packed parquet": (
        "a.parquet.gz",
        lambda path: path.write_bytes(gzip.compress(b"PAR1")),
        "the file is compressed",
    ),
    "a header only": ("a.csv", lambda path: path.write_text("text\n"), "the file is empty"),
    "nothing": ("a.tsv", lambda path: path.write_text(""), "the file is empty"),
    "no column": (
        "a.csv",
        lambda path: path.write_text(f"note\n{SECRET}\n"),
        r"has no field 'text', its first line, which must name the fields, has 1 field \(not shown,"
        r" .*; set data.field",
    ),
    "no header": (
        "a.csv",
        lambda path: path.write_text(f"{SECRET},{SECRET}2\nmore,words\n"),
        "has no field 'text', its first line, which must name the fields, has 2 fields",
    ),
    "no parquet column": (
        "a.parquet",
        lambda path: write_parquet(path, [{"note": SECRET}]),
        "has no field 'text', it has the fields note; set data.field",
    ),
    "null": (
        "a.parquet",
        lambda path: write_parquet(path, [{"text": "a"}, {"text": None}]),
        "row 2, field 'text' is not a string but null; remove",
    ),
    "a list": (
        "a.parquet",
        lambda path: write_parquet(path, [{"text": [SECRET]}]),
        "row 1, field 'text' is not a string but a list",
    ),
    "half a parquet": (
        "a.parquet",
        lambda path: (write_parquet(path, RECORDS), truncated(path)),
        r"cannot be read \(ArrowInvalid.*copy or export the file again",
    ),
    "half an arrow": (
        "a.arrow",
        lambda path: (write_arrow(path, RECORDS, False), truncated(path)),
        "cannot be read",
    ),
    "text in parquet": ("a.parquet", lambda path: path.write_text(SECRET), "cannot be read"),
    "half a gzip": (
        "a.jsonl.gz",
        lambda path: (FORMATS["a.jsonl.gz"](path, RECORDS), truncated(path)),
        "the gzip data are damaged or end early",
    ),
    "half a zstd": (
        "a.csv.zst",
        lambda path: (FORMATS["a.csv.zst"](path, RECORDS), truncated(path)),
        "the Zstandard data are damaged or end early",
    ),
    "an object": (
        "a.json",
        lambda path: path.write_text(f'[{{"text": "a"}}, "{SECRET}"]'),
        "element 2 of the array is not a JSON object but a string",
    ),
    "half an array": (
        "a.json",
        lambda path: path.write_text(f'[{{"text": "{SECRET}"}}, '),
        "is not JSON",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_and_not_quoted(name: str, tmp_path: Path) -> None:
    file, write, told = WRONG[name]
    write(tmp_path / file)
    with pytest.raises(EspalierError, match=rf"{tmp_path / file}.*{told}") as refused:
        shares(tmp_path, tmp_path / file)
    assert SECRET not in str(refused.value)


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", RECORDS)
    (tmp_path / "parts" / "README.md").write_text("about these data")
    with pytest.raises(EspalierError, match=r"different formats \(\.jsonl, text\)"):
        shares(tmp_path, tmp_path / "parts")


def test_files_have_no_splits(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", RECORDS)
    with pytest.raises(EspalierError, match=r"data.hub-split = 'test': .* has no splits; leave it"):
        shares(tmp_path, tmp_path / "parts", hub_split="test")


def test_whole_groups_are_enough_for_all_clients(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", RECORDS)
    with pytest.raises(EspalierError, match="there are 2 groups for num-clients = 3; lower num"):
        shares(tmp_path, tmp_path / "a.parquet", partition="by-group", group="sex")


def test_a_blank_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,ward\na,1\nb,\n")
    with pytest.raises(EspalierError, match="row 2, field 'ward' names no group, it is blank"):
        shares(tmp_path, tmp_path / "a.csv", group="ward")


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(EspalierError, match=rf"{tmp_path}/saved: cannot be read \(FileNotFound"):
        shares(tmp_path, tmp_path / "saved")


def test_a_split_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.DatasetDict({"test": datasets.Dataset.from_list(RECORDS)})
    found.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(EspalierError, match="has no split 'train', only test"):
        shares(tmp_path, tmp_path / "saved")


@pytest.mark.parametrize(
    ("key", "value"), [("field", "note"), ("group", "ward"), ("partition_field", "ward")]
)
def test_a_text_file_has_no_fields(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    with pytest.raises(EspalierError, match=rf"{key.replace('_', '-')} = '{value}': .* text file"):
        shares(tmp_path, tmp_path / "a.txt", **{key: value})
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(b'{"note": "oak"}'))
    with pytest.raises(EspalierError, match=r"is compressed \(bzip2\); unpack it"):
        shares(tmp_path, tmp_path / "a.jsonl.bz2", **{key: value})
