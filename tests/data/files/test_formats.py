"""The same records in every format give the same passages and items."""

from pathlib import Path

import pytest

from espalier.data.client_items import client_items
from espalier.data.client_text import held_out_samples, split_passages
from espalier.data.files import corpus_index, tables
from espalier.data.files.delimited import DelimitedRows
from espalier.data.files.formats import open_rows
from espalier.data.passages import is_held_out, split
from espalier.errors import EspalierError
from espalier.settings.node import parse_node
from espalier.settings.run import RunSettings, parse
from tests.data.files.written_files import (
    FORMATS,
    RECORDS,
    node,
    pyarrow,
    shares,
    write_lines,
    write_parts,
)


@pytest.fixture(params=[False, True], ids=["in memory", "index on disk"])
def indexed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 32)
    if request.param:
        monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
        monkeypatch.setattr(corpus_index, "ROWS_AT_ONCE", 50)


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
    own, held_out = split_passages(RunSettings(), site, 0)
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
    own, held_out = split_passages(RunSettings(), site, 0)
    assert (list(own), list(held_out)) == split(record["text"] for record in RECORDS)
    with pytest.raises(EspalierError, match=r"data-path = '.*\.csv': does not exist"):
        parse_node({**given, "data-path": str(tmp_path / "parts" / "*.csv")})


def test_a_pattern_names_files(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", RECORDS)
    found = open_rows(str(tmp_path / "parts" / "[02].jsonl"), "data.path")
    assert [Path(file.path).name for file in found] == ["0.jsonl", "2.jsonl"]


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
        "method": "fedpetuning", "task.name": "sst2", "num-clients": 2,
        "data.path": str(tmp_path / "a.jsonl"), "data.group": "wood", "data.partition": "by-group",
    }  # fmt: skip
    of = {record["sentence"]: record["wood"] for record in records}
    parts = [
        {of[item.texts[0]] for item in part}
        for client in range(2)
        for part in client_items(parse(run), node(tmp_path), client)
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 50


def groups_by_side() -> tuple[str, str]:
    """Return the name of a group that is held out, and of one that is not."""
    names = [f"w{number}" for number in range(100)]
    return next(filter(is_held_out, names)), next(name for name in names if not is_held_out(name))


@pytest.mark.parametrize("task", ["sst2", "text"])
def test_a_client_s_only_group_is_not_held_out(task: str, tmp_path: Path) -> None:
    """With a second group that is not held out, the first one is."""
    out, other = groups_by_side()
    for groups, expected in (([out], {out}), ([out, other], {other})):
        write_lines(
            tmp_path / "a.jsonl",
            [{"sentence": f"{g} {n}", "label": n % 2, "wood": g} for g in groups for n in range(5)],
        )
        run = {
            "method": "fedpetuning", "task.name": task, "num-clients": 1,
            "data.path": str(tmp_path / "a.jsonl"), "data.group": "wood",
        }  # fmt: skip
        if task == "text":
            run |= {"data.field": "sentence"}
            own, held_out = split_passages(parse(run), node(tmp_path), 0)
            found = [{text.split()[0] for text in part} for part in (own, held_out)]
        else:
            parts = client_items(parse(run), node(tmp_path), 0)
            found = [{item.texts[0].split()[0] for item in part} for part in parts]
        assert found == [expected, {*groups} - expected]


def test_a_client_s_only_group_leaves_no_text_to_evaluate_on(tmp_path: Path) -> None:
    _, own = groups_by_side()
    write_lines(tmp_path / "a.jsonl", [{"text": f"{own} {n}", "wood": own} for n in range(50)])
    run = {"num-clients": 1, "data.path": str(tmp_path / "a.jsonl"), "data.group": "wood"}
    run |= {"evaluation.own-text": True, "evaluation.sequence-length": 16}
    with pytest.raises(EspalierError, match="is empty, because whole groups are held out"):
        held_out_samples(parse(run), node(tmp_path), lambda text: list(text.encode()), 0)


def test_in_a_private_run_a_group_does_not_decide_about_another(tmp_path: Path) -> None:
    out, _ = groups_by_side()
    rows = [{"sentence": f"{out} {n}", "label": n % 2, "wood": out} for n in range(5)]
    write_lines(tmp_path / "a.jsonl", rows)
    run = {
        "method": "fedpetuning", "task.name": "sst2", "num-clients": 1, "privacy.epsilon": 8.0,
        "data.path": str(tmp_path / "a.jsonl"), "data.group": "wood",
        "federation.client-weights": "equal", "evaluation.local-baseline": False,
    }  # fmt: skip
    with pytest.raises(EspalierError, match="all its groups are held out"):
        client_items(parse(run), node(tmp_path), 0)


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


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("id,text;note", "1,one;two", {"id": "1", "text;note": "one;two"}),
        ('id;"text, note"', "1;one, two", {"id": "1", "text, note": "one, two"}),
        ("id\ttext", "1\tone, two", {"id": "1", "text": "one, two"}),
        ("id|text", "1|one;two", {"id": "1", "text": "one;two"}),
    ],
)
def test_the_header_shows_what_separates_fields(
    header: str, row: str, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n{row}\n")
    (file,) = open_rows(str(tmp_path / "a.csv"), "data.path")
    assert [one.record for one in file.rows()] == [expected]


def test_types_that_pyarrow_cannot_take_rows_of_are_read(tmp_path: Path) -> None:
    notes = pyarrow.array([f"note {n}" for n in range(600)], pyarrow.string_view())
    table = pyarrow.table({"text": notes})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    write_lines(tmp_path / "a.jsonl", table.to_pylist())
    assert shares(tmp_path, tmp_path / "a.arrow") == shares(tmp_path, tmp_path / "a.jsonl")


def test_endings_of_one_format_may_be_mixed(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.ndjson.gz"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert len(open_rows(str(tmp_path), "data.path")) == 2


def test_a_delimiter_gives_all_rows_as_many_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text, full\n1;oak, elm, ash\n2;fir\n")
    (file,) = open_rows(str(tmp_path / "a.csv"), "data.path")
    assert [dict(row.record) for row in file.rows()] == [
        {"id": "1", "text, full": "oak, elm, ash"},
        {"id": "2", "text, full": "fir"},
    ]
