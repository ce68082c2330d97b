"""The same records in every format give the same passages and items; damaged files are named."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items
from espalier.data.client_text import split_passages
from espalier.data.files import corpus_index, tables
from espalier.data.files.formats import open_rows
from espalier.data.files.tables import DelimitedRows
from espalier.data.passages import split
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, parse_node, simulated_node
from espalier.settings.run import parse
from espalier.settings.tables.data import DataSettings

pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hub' is not installed")

SECRET = "Anna K."
RECORDS = [
    {
        "text": f'note {n % 40}\n\nof ward {n % 7}, "{SECRET}";\tné',
        "ward": f"w{n % 5}",
        "sex": n % 2,
    }
    for n in range(600)
]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_table(path: Path, records: list[dict[str, Any]], delimiter: str) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=70)


def write_arrow(path: Path, records: list[dict[str, Any]], stream: bool) -> None:
    table = pyarrow.Table.from_pylist(records)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)


def write_saved(path: Path, records: list[dict[str, Any]], splits: bool) -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(records)
    if splits:
        found = datasets.DatasetDict({"train": found, "test": found.select([0])})
    found.save_to_disk(str(path))


def write_parts(path: Path, records: list[dict[str, Any]]) -> None:
    path.mkdir()
    for part in range(3):
        write_lines(path / f"{part}.jsonl", records[part * 200 : (part + 1) * 200])
    (path / ".hidden").write_text("not data")


def pack(path: Path, write: Callable[[Path], None]) -> None:
    plain = path.with_suffix("")
    write(plain)
    data = plain.read_bytes()
    plain.unlink()
    packed = (
        gzip.compress(data)
        if path.suffix == ".gz"
        else pyarrow.Codec("zstd").compress(data, asbytes=True)
    )
    path.write_bytes(packed)


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.jsonl": write_lines,
    "a.ndjson": write_lines,
    "lines.json": write_lines,
    "a.json": lambda path, records: path.write_text(json.dumps(records, indent=1)) and None,
    "a.csv": lambda path, records: write_table(path, records, ","),
    "semicolons.csv": lambda path, records: write_table(path, records, ";"),
    "a.tsv": lambda path, records: write_table(path, records, "\t"),
    "a.parquet": write_parquet,
    "a.arrow": lambda path, records: write_arrow(path, records, False),
    "a.feather": lambda path, records: write_arrow(path, records, True),
    "saved": lambda path, records: write_saved(path, records, False),
    "splits": lambda path, records: write_saved(path, records, True),
    "parts": write_parts,
    "a.jsonl.gz": lambda path, records: pack(path, lambda plain: write_lines(plain, records)),
    "a.csv.zst": lambda path, records: pack(path, lambda plain: write_table(plain, records, ",")),
}


@pytest.fixture(params=[False, True], ids=["in memory", "index on disk"])
def indexed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 32)
    if request.param:
        monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
        monkeypatch.setattr(corpus_index, "ROWS_AT_ONCE", 50)


def node(tmp_path: Path) -> NodeSettings:
    return simulated_node(state_dir=str(tmp_path / "state"))


def shares(tmp_path: Path, path: Path, **data: Any) -> list[tuple[list[str], list[str]]]:
    settings = DataSettings(path=str(path), **data)
    found = [split_passages(settings, node(tmp_path), client, 3, 1) for client in range(3)]
    return [(list(own), list(held_out)) for own, held_out in found]


@pytest.mark.usefixtures("indexed")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_passages(name: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "expected.jsonl", RECORDS)
    FORMATS[name](tmp_path / name, RECORDS)
    for data in ({}, {"partition": "by-field", "partition_field": "ward"}, {"group": "ward"}):
        expected = shares(tmp_path, tmp_path / "expected.jsonl", **data)
        assert shares(tmp_path, tmp_path / name, **data) == expected
    own, held_out = split(record["text"] for record in RECORDS)
    found = shares(tmp_path, tmp_path / name)
    assert {text for part in found for text in part[0]} == set(own)
    assert {text for part in found for text in part[1]} == set(held_out)


@pytest.mark.parametrize("name", FORMATS)
def test_a_site_reads_every_format(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name, RECORDS)
    site = parse_node(
        {"site": "a", "data-path": str(tmp_path / name), "state-dir": str(tmp_path / "state")}
    )
    own, held_out = split_passages(DataSettings(), site, 0, 3, 1)
    assert (list(own), list(held_out)) == split(record["text"] for record in RECORDS)


@pytest.mark.parametrize("name", FORMATS)
def test_tasks_read_every_format(name: str, tmp_path: Path) -> None:
    records = [{"sentence": f"tree {n}", "label": n % 2} for n in range(600)]
    FORMATS[name](tmp_path / name, records)
    run = {
        "method": "fedpetuning",
        "task.name": "sst2",
        "num-clients": 2,
        "data.path": str(tmp_path / name),
    }
    items = [
        item.texts[0]
        for client in range(2)
        for part in client_items(parse(run), node(tmp_path), client)
        for item in part
    ]
    assert sorted(items) == sorted(record["sentence"] for record in records)


def test_a_site_s_pattern_names_files(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", RECORDS)
    (tmp_path / "parts" / "README.md").write_text("about these data")
    given = {"site": "a", "state-dir": str(tmp_path / "state")}
    site = parse_node({**given, "data-path": str(tmp_path / "parts" / "*.jsonl")})
    own, held_out = split_passages(DataSettings(), site, 0, 3, 1)
    assert (list(own), list(held_out)) == split(record["text"] for record in RECORDS)
    with pytest.raises(EspalierError, match=r"data-path = '.*\.csv': does not exist"):
        parse_node({**given, "data-path": str(tmp_path / "parts" / "*.csv")})


def test_a_pattern_names_files(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", RECORDS)
    found = open_rows(str(tmp_path / "parts" / "[02].jsonl"), "data.path")
    assert [Path(file.path).name for file in found] == ["0.jsonl", "2.jsonl"]


# ----- columns ------------------------------------------------------------------------------------


def dolly_run(path: Path, columns: str) -> dict[str, Any]:
    return {
        "method": "fedpetuning",
        "task.name": "dolly",
        "data.path": str(path),
        "data.columns": columns,
    }


def test_columns_rename_the_fields_of_a_task(tmp_path: Path) -> None:
    records = [
        {"question": f"Name {n}", "answer": "Oak.", "kind": "a", "context": ""} for n in range(90)
    ]
    write_table(tmp_path / "a.csv", records, ",")
    columns = "instruction=question, response=answer, category=kind"
    own, held_out = client_items(parse(dolly_run(tmp_path / "a.csv", columns)), node(tmp_path), 0)
    assert {item.gold for item in (*own, *held_out)} == {"Oak."}
    assert all("Name " in item.prompt for item in own)
    site = parse_node(
        {
            "site": "a",
            "data-path": str(tmp_path / "a.csv"),
            "data-task": "dolly",
            "data-columns": columns,
            "state-dir": str(tmp_path / "state"),
        }
    )
    run = parse({"method": "fedpetuning", "task.name": "dolly"}, simulation=False)
    assert len(client_items(run, site, 0)[0]) > len(own)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", [{"question": SECRET}], ",")
    with pytest.raises(
        EspalierError,
        match="row 1 has no field 'asked' for the task's field 'instruction', it has the fields question",
    ):
        client_items(parse(dolly_run(tmp_path / "a.csv", "instruction=asked")), node(tmp_path), 0)


@pytest.mark.parametrize(
    ("columns", "told"),
    [("instruction", "is not a pair"), ("a=b,a=c", "'a' occurs twice"), ("=b", "is not a pair")],
)
def test_columns_are_pairs(columns: str, told: str) -> None:
    with pytest.raises(EspalierError, match=told):
        parse(dolly_run(Path("a.csv"), columns))


# ----- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "quantity", "by-group"])
def test_a_group_is_never_divided(partition: str, tmp_path: Path) -> None:
    """Neither between clients nor between training and held-out text."""
    records = [{"text": f"note {n}", "patient": n % 60} for n in range(600)]
    write_lines(tmp_path / "a.jsonl", records)
    of = {record["text"]: record["patient"] for record in records}
    found = shares(tmp_path, tmp_path / "a.jsonl", partition=partition, group="patient")
    parts = [{of[text] for text in part} for share in found for part in share]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    assert any(parts[1::2])
    if partition == "by-group":
        assert [
            len(own) + len(held_out) for own, held_out in zip(parts[::2], parts[1::2], strict=True)
        ] == [20, 20, 20]


def test_groups_of_a_task_are_not_divided(tmp_path: Path) -> None:
    records = [{"sentence": f"tree {n}", "label": n % 2, "wood": f"w{n % 50}"} for n in range(500)]
    write_lines(tmp_path / "a.jsonl", records)
    run = {
        "method": "fedpetuning", "task.name": "sst2", "num-clients": 2, "data.path": str(tmp_path / "a.jsonl"),
        "data.group": "wood", "data.partition": "by-group",
    }  # fmt: skip
    of = {record["sentence"]: record["wood"] for record in records}
    parts = [
        {of[item.texts[0]] for item in part}
        for client in range(2)
        for part in client_items(parse(run), node(tmp_path), client)
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 50


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"data.partition": "by-group"}, "needs data.group"),
        (
            {"data.partition": "dirichlet", "data.group": "g", "data.partition-field": "f"},
            "would divide the groups of data.group = 'g'",
        ),
    ],
)
def test_groups_and_partition_must_fit(data: dict[str, str], told: str) -> None:
    with pytest.raises(EspalierError, match=told):
        parse({"method": "fedprllm", "data.path": "a.jsonl"} | data)


# ----- wrong files --------------------------------------------------------------------------------


def test_blank_space_around_column_names_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id, text \n1, one\n")
    (row,) = DelimitedRows(str(path), "data.path", ",").rows(["text"])
    assert row.record == {"id": "1", "text": " one"}


def test_semicolons_separate_only_without_a_comma_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text;note\n1,one;two\n")
    (row,) = DelimitedRows(str(path), "data.path", ",").rows(["text;note"])
    assert row.record == {"id": "1", "text;note": "one;two"}


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


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
    "an open quote": ("a.csv", lambda path: path.write_text(f'text\n"{SECRET}\n'), "is not CSV"),
    "two names": (
        "a.csv",
        lambda path: path.write_text("text,text\na,b\n"),
        "two columns of the header have the same name",
    ),
    "a header only": ("a.csv", lambda path: path.write_text("text\n"), "the file is empty"),
    "nothing": ("a.tsv", lambda path: path.write_text(""), "the file is empty"),
    "no column": (
        "a.csv",
        lambda path: path.write_text(f"note\n{SECRET}\n"),
        "has no field 'text', it has the fields note; set data.field",
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
