"""Fields of a file that a task reads: their names, optional ones, labels and groups."""

from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items, public_items
from espalier.data.files.formats import open_rows
from espalier.data.files.rows import group_of
from espalier.errors import EspalierError
from espalier.settings.node import parse_node
from espalier.settings.run import parse
from tests.data.files.written_files import SECRET, node, write_lines, write_table


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


def test_the_issue_s_example_needs_no_further_column(tmp_path: Path) -> None:
    records = [{"question": f"{n}?", "answer": "Oak."} for n in range(30)]
    write_table(tmp_path / "a.csv", records, ",")
    run = dolly_run(tmp_path / "a.csv", "instruction=question,output=answer")
    run |= {"task.name": "alpaca", "num-clients": 1}
    own, held_out = client_items(parse(run), node(tmp_path), 0)
    assert len(own) + len(held_out) == 30


def test_a_mapped_field_is_never_read_under_the_task_s_own_name(tmp_path: Path) -> None:
    """Otherwise a run could read a field that the owner of a site did not name."""
    records = [{"note": SECRET, "summary": f"a {n}", "answer": "Oak."} for n in range(30)]
    del records[7]["summary"]
    write_lines(tmp_path / "a.jsonl", records)
    site = parse_node(
        {
            "site": "a",
            "data-path": str(tmp_path / "a.jsonl"),
            "data-task": "completion",
            "data-columns": "note=summary",
            "state-dir": str(tmp_path / "state"),
        }
    )
    chosen = {"method": "fedpetuning", "task.name": "completion", "data.prompt": "{note}\\n"}
    with pytest.raises(EspalierError, match=r"line 8 has no field 'summary' for .*'note'") as error:
        client_items(parse(chosen, simulation=False), site, 0)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("columns", ["foo=question", "ANSWER=response"])
def test_a_field_that_the_task_does_not_have_is_refused(columns: str, tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", [{"question": "a", "response": "b"}], ",")
    with pytest.raises(EspalierError, match=r"task dolly has no field '.*', only instruction,"):
        client_items(parse(dolly_run(tmp_path / "a.csv", columns)), node(tmp_path), 0)


def sst2_parts(folder: Path, number: int) -> dict[str, Any]:
    """Write files of nine records each to ``parts``, and return the settings of two clients."""
    (folder / "parts").mkdir()
    for part in range(number):
        records = [{"sentence": f"{part} {n}", "label": n % 2} for n in range(9)]
        write_lines(folder / "parts" / f"{part}.jsonl", records)
    return {"method": "fedpetuning", "task.name": "sst2", "num-clients": 2}


@pytest.mark.parametrize(
    ("trained", "tested"),
    [
        ("parts", "parts/0.jsonl"),
        ("parts/*.jsonl", "parts/1.jsonl"),
        ("parts/{client}.jsonl", "parts"),
    ],
)
def test_tests_in_a_file_of_the_clients_are_refused(
    trained: str, tested: str, tmp_path: Path
) -> None:
    run = sst2_parts(tmp_path, 2)
    run |= {"data.path": str(tmp_path / trained), "task.test-path": str(tmp_path / tested)}
    with pytest.raises(EspalierError, match=r"task.test-path.*clients train on .*parts/\d.jsonl"):
        public_items(parse(run))


def test_a_file_of_no_client_may_be_the_test(tmp_path: Path) -> None:
    run = sst2_parts(tmp_path, 3)
    run |= {
        "data.path": str(tmp_path / "parts"),
        "data.partition": "by-file",
        "task.test-path": str(tmp_path / "parts" / "2.jsonl"),
    }
    assert len(public_items(parse(run))) == 9


@pytest.mark.parametrize(
    ("task", "columns", "record"),
    [
        ("hellaswag", "ctx=start", {"start": "A", "endings": [*"bcde"], "label": 1}),
        ("boolq", "label=truth", {"passage": "p", "question": "q", "answer": True, "truth": 0}),
    ],
)
def test_every_field_that_a_task_reads_can_be_mapped(
    task: str, columns: str, record: dict[str, Any], tmp_path: Path
) -> None:
    write_lines(tmp_path / "a.jsonl", [record | {"activity_label": "x"} for _ in range(1)] * 3)
    run = {
        "method": "fedpetuning",
        "task.name": task,
        "num-clients": 1,
        "data.path": str(tmp_path / "a.jsonl"),
        "data.columns": columns,
    }
    own, held_out = client_items(parse(run), node(tmp_path), 0)
    (item,) = (*own, *held_out)
    assert item.gold.strip() in ("c", "no")


def test_public_items_may_have_the_task_s_names(tmp_path: Path) -> None:
    """Also if one of the mapped names is a name of the task."""
    write_lines(tmp_path / "test.jsonl", [{"question": "oak?", "answer": "yes"}])
    run = {
        "method": "fedpetuning",
        "task.name": "completion",
        "data.prompt": "{question}\\n",
        "data.path": str(tmp_path / "train.jsonl"),
        "data.columns": "question=question,answer=solution",
        "task.test-path": str(tmp_path / "test.jsonl"),
    }
    write_lines(tmp_path / "train.jsonl", [{"question": "elm?", "solution": "no"}])
    assert [item.gold for item in public_items(parse(run))] == ["yes"]


def test_names_of_a_saved_dataset_decide_about_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"tree {n}" for n in range(30)], "label": [n % 2 for n in range(30)]}
    kinds = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"])
    )
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "saved"))
    run = {
        "method": "fedpetuning",
        "task.name": "classification",
        "data.path": str(tmp_path / "saved"),
        "data.prompt": "{text}\\n",
    }
    for labels in ("pos,neg", "neg,pos", "no,yes", "Pos,Neg"):
        own, _ = client_items(parse(run | {"data.labels": labels}), node(tmp_path), 0)
        first, second = labels.split(",")
        expected = (second, first) if first.lower() == "pos" else (first, second)
        assert all(item.gold == expected[int(item.prompt.split()[1]) % 2] for item in own)


def test_a_field_divides_items_that_have_no_label(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}],
         "topic": f"t{n % 2}"}
        for n in range(60)
    ]  # fmt: skip
    write_lines(tmp_path / "a.jsonl", records)
    run = {
        "method": "fedpetuning",
        "task.name": "chat",
        "num-clients": 2,
        "data.path": str(tmp_path / "a.jsonl"),
        "data.partition": "by-field",
    }
    with pytest.raises(EspalierError, match=r"have no label; name another field of theirs"):
        client_items(parse(run), node(tmp_path), 0)
    run = parse(run | {"data.partition-field": "topic"})
    topics = [
        {int(item.prompt.split()[1][:-1]) % 2 for part in parts for item in part}
        for parts in (client_items(run, node(tmp_path), client) for client in range(2))
    ]
    assert sorted(map(sorted, topics)) == [[0], [1]]


def test_whole_numbers_are_one_group_in_both_types(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"group": 1}, {"group": 1.0}, {"group": 1.5}])
    (file,) = open_rows(str(tmp_path / "a.jsonl"), "data.path")
    assert [group_of(row, "group") for row in file.rows()] == ["1", "1", "1.5"]


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", [{"question": SECRET}], ",")
    with pytest.raises(
        EspalierError,
        match=(
            r"row 1 \(one field, without , ; tab \| in the header\) has no field 'asked' for the"
            " task's field 'instruction', its first line, which must name the fields, has 1 field"
        ),
    ):
        client_items(parse(dolly_run(tmp_path / "a.csv", "instruction=asked")), node(tmp_path), 0)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("instruction", "is not a pair"),
        ("a=b,a=c", "'a' occurs twice"),
        ("=b", "is not a pair"),
        ("a=b\n,c=d", "is not a list"),
    ],
)
def test_columns_are_pairs(columns: str, told: str) -> None:
    with pytest.raises(EspalierError, match=told):
        parse(dolly_run(Path("a.csv"), columns))


def test_a_pair_in_quotes_may_contain_a_comma(tmp_path: Path) -> None:
    records = [{"Question, full": f"{n}?", "answer": "Oak."} for n in range(30)]
    write_table(tmp_path / "a.csv", records, ",")
    columns = '"instruction=Question, full", output=answer'
    run = dolly_run(tmp_path / "a.csv", columns) | {"task.name": "alpaca", "num-clients": 1}
    own, _ = client_items(parse(run), node(tmp_path), 0)
    assert "0?" in own[0].prompt
    with pytest.raises(EspalierError, match="put a pair that contains a comma in double quotes"):
        parse(run | {"data.columns": "instruction=Question, full"})


def test_a_misspelt_field_of_a_site_is_told(tmp_path: Path) -> None:
    """Its columns may have names for other tasks, but hardly names that are nearly right."""
    write_table(
        tmp_path / "a.csv", [{"question": f"{n}?", "response": "Oak."} for n in range(30)], ","
    )
    own = {"site": "a", "data-path": str(tmp_path / "a.csv"), "data-task": "dolly"}
    own["state-dir"] = str(tmp_path / "state")
    run = parse({"method": "fedpetuning", "task.name": "dolly"}, simulation=False)
    with pytest.raises(
        EspalierError, match="no field 'instrction'; did you mean instruction=quest"
    ):
        client_items(run, parse_node(own | {"data-columns": "instrction=question"}), 0)
    fits = own | {"data-columns": "instruction=question,text=question"}
    assert len(client_items(run, parse_node(fits), 0)[0]) > 10
