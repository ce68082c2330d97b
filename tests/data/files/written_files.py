"""Records, written as files of every format."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_text import split_passages
from espalier.settings.node import NodeSettings, simulated_node
from espalier.settings.tables.data import DataSettings
from tests.data.client_passages import run_on

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


def node(tmp_path: Path) -> NodeSettings:
    return simulated_node(state_dir=str(tmp_path / "state"))


def shares(tmp_path: Path, path: Path, **data: Any) -> list[tuple[list[str], list[str]]]:
    settings = DataSettings(path=str(path), **data)
    found = [split_passages(run_on(settings, 3, 1), node(tmp_path), client) for client in range(3)]
    return [(list(own), list(held_out)) for own, held_out in found]
