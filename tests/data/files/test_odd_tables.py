"""Files as programs write them: unreadable columns, empty parts, links, odd delimiters, labels."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items
from espalier.data.client_text import split_passages
from espalier.data.files import corpus_index
from espalier.data.site_data_check import require_readable
from espalier.data.tasks.item import Item
from espalier.errors import EspalierError
from espalier.settings.node import parse_node
from espalier.settings.run import RunSettings, parse
from tests.data.files.written_files import node, pyarrow, write_lines

ASKED = [f"question {number}" for number in range(40)]


def items_of(folder: Path, path: Path, **given: Any) -> list[Item]:
    run = {"method": "fedpetuning", "num-clients": 1, "data.path": str(path)} | {
        key.replace("__", ".").replace("_", "-"): value for key, value in given.items()
    }
    return [item for part in client_items(parse(run), node(folder), 0) for item in part]


def completions(**more: list[Any]) -> list[dict[str, Any]]:
    rows = [{"prompt": asked, "completion": "elm"} for asked in ASKED]
    return [
        {**row, **{name: values[number % len(values)] for name, values in more.items()}}
        for number, row in enumerate(rows)
    ]


def write_table(path: Path, columns: dict[str, Any]) -> None:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize("kind", ["date", "bytes"])
def test_a_column_that_nobody_needs_may_be_unreadable(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    number = len(ASKED)
    # A day in the year 25,000, and bytes in Latin-1.
    odd = (
        pyarrow.array([8_400_000] * number, pyarrow.int32()).cast(pyarrow.date32())
        if kind == "date"
        else pyarrow.array([b"\xe4"] * number).view(pyarrow.string())
    )
    write_table(file, {"prompt": ASKED, "completion": ["elm"] * number, "odd": odd})
    assert len(items_of(tmp_path, file, task__name="chat")) == number
    with pytest.raises(EspalierError, match=r"rows 1 to 40, field 'odd': cannot be read"):
        items_of(tmp_path, file, task__name="chat", data__columns="prompt=odd")
    # The fields of an error are listed all the same.
    with pytest.raises(EspalierError, match=r"odd \(it cannot be read\)"):
        items_of(tmp_path, file, task__name="dolly")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
def test_some_files_of_a_directory_may_be_empty(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    full = folder / f"a.{ending}"
    empty = folder / f"b.{ending}"
    if ending == "parquet":
        write_table(full, {"text": ASKED})
        write_table(empty, {"text": pyarrow.array([], pyarrow.string())})
    else:
        header = "text\n" if ending == "csv" else ""
        texts = [json.dumps({"text": text}) for text in ASKED] if ending == "jsonl" else ASKED
        full.write_text(header + ("\n\n" if ending == "txt" else "\n").join(texts))
        empty.write_text("")
    run = RunSettings(data={"path": str(folder)}, num_clients=1)
    own, held_out = split_passages(run, node(tmp_path), 0)
    assert len(own) + len(held_out) == len(ASKED)
    full.unlink()
    with pytest.raises(EspalierError, match="the file is empty"):
        split_passages(run, node(tmp_path), 0)


def test_a_broken_link_is_not_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_lines(folder / "a.jsonl", completions())
    (folder / "b.jsonl").symlink_to(tmp_path / "nowhere")
    write_lines(folder / "c.jsonl", completions())
    for path in (folder, folder / "*.jsonl"):
        with pytest.raises(EspalierError, match=r"b.jsonl: no such file"):
            items_of(tmp_path, path, task__name="chat")
    by_file = {"data.partition": "by-file", "num-clients": 3, "data.path": str(folder)}
    run = parse({"method": "fedpetuning", "task.name": "chat"} | by_file)
    with pytest.raises(EspalierError, match=r"b.jsonl: no such file"):
        client_items(run, node(tmp_path), 1)
    assert len(client_items(run, node(tmp_path), 2)[0]) > 30


@pytest.mark.parametrize("length", [1, 5000])
def test_the_delimiter_does_not_depend_on_the_length_of_a_row(length: int, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = [f"{number};{'word ' * length}{number}" for number in range(40)]
    file.write_text("\n".join(["id;text, in full", *rows]))
    run = RunSettings(data={"path": str(file), "field": "text, in full"}, num_clients=1)
    own, _ = split_passages(run, node(tmp_path), 0)
    assert all(text.startswith("word ") for text in own)


@pytest.mark.parametrize("listed", ["0,1,2", "0.0,1.0,2.0", "2,1,0"])
@pytest.mark.parametrize("values", [[0, 1, 2], [0.0, 1.0, 2.0], ["0.0", "1.0", "2"]])
def test_labels_that_are_numbers_are_compared_as_numbers(
    listed: str, values: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    write_lines(file, completions(label=values))
    found = items_of(
        tmp_path, file, task__name="classification", data__prompt="{prompt}", data__labels=listed
    )
    labels = [float(label) for label in listed.split(",")]
    for item in found:
        number = int(item.prompt.split()[-1])
        assert labels[item.answer] == float(values[number % 3])


def test_decimals_are_labels_and_groups(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    patients = [Decimal(number // 2) for number in range(40)]
    write_table(
        file,
        {
            "prompt": ASKED,
            "completion": ["elm"] * 40,
            "patient": patients,
            "half": [Decimal("0.5")] * 40,
        },
    )
    run = {"task.name": "chat", "method": "fedpetuning", "num-clients": 1}
    given = run | {"data.path": str(file), "data.group": "patient"}
    own, held_out = client_items(parse(given), node(tmp_path), 0)
    assert len({*own.label_numbers.tolist(), *held_out.label_numbers.tolist()}) == 20
    assert len(items_of(tmp_path, file, task__name="chat", data__partition_field="half")) == 40


def test_null_fields_of_the_other_form_of_messages_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    openai = [
        {"role": role, "content": text, "from": None, "value": None}
        for role, text in (("user", "an oak?"), ("assistant", "yes"))
    ]
    sharegpt = [
        {"role": None, "content": None, "from": role, "value": text}
        for role, text in (("human", "an elm?"), ("gpt", "no"))
    ]
    write_lines(file, [{"messages": openai, "id": n} for n in range(30)] + [{"messages": sharegpt}])
    found = {item.gold for item in items_of(tmp_path, file, task__name="chat")}
    assert found == {"assistant: yes", "assistant: no"}


def test_another_prompt_on_a_large_file_is_another_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
    file = tmp_path / "a.jsonl"
    write_lines(file, completions(label=["a", "b"]))
    for prompt in ("{prompt}", "Q: {prompt}", "{prompt}"):
        found = items_of(
            tmp_path, file, task__name="completion", data__prompt=prompt,
            data__columns="answer=completion",
        )  # fmt: skip
        assert {item.prompt.startswith("Q: ") for item in found} == {prompt.startswith("Q: ")}
    for labels in ("a,b", "b,a"):
        found = items_of(
            tmp_path, file, task__name="classification", data__prompt="{prompt}",
            data__labels=labels,
        )  # fmt: skip
        assert found[0].options == tuple(labels.split(","))


def test_an_index_of_other_items_is_built_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade to a release that reads records otherwise."""
    monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
    file = tmp_path / "a.jsonl"
    write_lines(file, completions())
    items_of(tmp_path, file, task__name="chat")
    with monkeypatch.context() as patch:
        patch.setattr(
            "espalier.data.tasks.task_source.digest", lambda text: f"other {text}".encode()
        )
        with pytest.raises(EspalierError, match="the file changed"):
            items_of(tmp_path, file, task__name="chat")
        assert len(items_of(tmp_path, file, task__name="chat")) == len(ASKED)


@pytest.mark.parametrize(
    ("own", "task", "words"),
    [
        ({"data-group": "nope"}, {"task.name": "chat"}, "has no field 'nope'"),
        (
            {"data-task": "completion"},
            {"task.name": "completion", "data.prompt": "{prompt}"},
            "this site's data-columns does not name",
        ),
    ],
)
def test_a_large_file_of_a_site_is_checked_before_it_takes_part(
    own: dict[str, Any],
    task: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("espalier.data.site_data_check.LARGE", 1)
    file = tmp_path / "a.jsonl"
    write_lines(file, completions())
    given = {"site": "a", "data-path": str(file), "data-task": "chat", "min-tokens": 1} | own
    run = parse({"method": "fedpetuning"} | task)
    with pytest.raises(EspalierError, match=words):
        require_readable(run, parse_node(given))


def texts_of(folder: Path, file: Path, field: str) -> list[str]:
    run = RunSettings(data={"path": str(file), "field": field}, num_clients=1)
    return sorted(text for part in split_passages(run, node(folder), 0) for text in part)


def test_lines_that_are_rows_each_are_not_joined_by_their_quotes(tmp_path: Path) -> None:
    """A quote is a part of the text in most TSV files; only one within a row can be a mark."""
    file = tmp_path / "a.tsv"
    file.write_text('id\tt\n1\toak\n2\t"Hello\n3\tbye"\n4\tash\n')
    with pytest.raises(EspalierError, match="row 2 goes on over several lines by its quotes"):
        texts_of(tmp_path, file, "t")
    file.write_text('id\tt\n1\toak\n2\t"Hello\nbye"\n4\t"a\ttab"\n')
    assert texts_of(tmp_path, file, "t") == ["Hello\nbye", "a\ttab", "oak"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_blank_lines_of_a_table_do_not_count(line_end: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    lines = ["", "id\tt", "", "1\toak", "", "", "2\telm", ""]
    file.write_bytes(line_end.join(lines).encode())
    assert texts_of(tmp_path, file, "t") == ["elm", "oak"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_first_line_of_excel_names_the_delimiter(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(mark + "sep=;\r\nweight, kg;body\r\n1,5;oak\r\n2,5;elm\r\n")
    assert texts_of(tmp_path, file, "body") == ["elm", "oak"]
    file.write_text('sep=;\nbody\noak\n"elm\n')
    with pytest.raises(EspalierError, match="line 4 is not CSV: a field does not end"):
        texts_of(tmp_path, file, "body")


def test_the_field_that_is_asked_for_decides_between_delimiters(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for text, expected in (
        ("weight, kg;body\n1,5;oak\n2,5;elm\n", ["elm", "oak"]),
        ("\nweight, kg;body\n\n1,5;oak\n2,5;elm", ["elm", "oak"]),
        ("weight, kg;body\n1,5;oak\x0celm", ["oak\x0celm"]),
    ):
        file.write_text(text)
        assert texts_of(tmp_path, file, "body") == expected


def test_truth_values_of_tables_may_have_any_case(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = [f"{asked},{('TRUE', 'False')[n % 2]}" for n, asked in enumerate(ASKED)]
    file.write_text("\n".join(["prompt,label", *rows]))
    given = {"task__name": "classification", "data__prompt": "{prompt}"}
    for item in items_of(tmp_path, file, data__labels="false,true", **given):
        assert item.gold == ("true", "false")[int(item.prompt.split()[-1]) % 2]


def test_files_without_any_record_are_empty(tmp_path: Path) -> None:
    """Each of several files may be empty, but not all of them."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text("text\n")
    with pytest.raises(EspalierError, match=r"a\.csv: the file is empty; name a file"):
        texts_of(tmp_path, folder, "text")
    (folder / "b.csv").write_text("text\noak\n")
    assert texts_of(tmp_path, folder, "text") == ["oak"]


def test_an_empty_saved_dataset_is_empty(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list([{"text": "oak"}]).select([])
    found.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(EspalierError, match="saved: the file is empty; name a file that contains"):
        texts_of(tmp_path, tmp_path / "saved", "text")
