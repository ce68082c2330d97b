"""Hugging Face datasets, tested with a local folder; the library reads both alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.files.hub import HubRows
from espalier.data.files.records import Record
from espalier.data.files.rows import text_of
from espalier.data.passages import is_held_out
from espalier.errors import EspalierError
from espalier.settings.node import simulated_node
from espalier.settings.tables.data import DataSettings
from tests.data.client_passages import client_passages

datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "notes"
    folder.mkdir()
    records = [{"note": f"note {number} of the ward", "ward": number % 2} for number in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder)


def records_of(name: str, split: str, field: str, label: str = "") -> list[Record]:
    rows = HubRows(name, "", split, f"data.path = {name!r}: the dataset").rows()
    return [text_of(row, field, label) for row in rows]


def test_texts_and_labels_are_read(dataset: str) -> None:
    records = records_of(dataset, "train", "note", "ward")
    assert [record.text for record in records] == [
        f"note {number} of the ward" for number in range(40)
    ]
    assert [record.label for record in records] == [str(number % 2) for number in range(40)]


def test_it_is_dealt_out_like_a_file(dataset: str) -> None:
    data = DataSettings(
        source="hub", path=dataset, field="note", partition="by-field", partition_field="ward"
    )
    for client in range(2):
        own = [f"note {number} of the ward" for number in range(40) if number % 2 == client]
        assert client_passages(data, simulated_node(), client, 2) == [
            text for text in own if not is_held_out(text)
        ]


def test_split_defaults_to_train(dataset: str) -> None:
    for split, expected in (("", 40), ("train[:30]", 30)):
        data = DataSettings(source="hub", path=dataset, field="note", hub_split=split)
        every = {f"note {number} of the ward" for number in range(expected)}
        dealt = {
            text
            for client in range(2)
            for text in client_passages(data, simulated_node(), client, 2)
        }
        assert dealt == {text for text in every if not is_held_out(text)}


def test_a_field_that_is_not_there_is_a_mistake(dataset: str) -> None:
    with pytest.raises(
        EspalierError,
        match=r"\(train\): row 1 has no field 'text', it has the fields note .*set data.field",
    ):
        records_of(dataset, "train", "text")


def test_a_dataset_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match="the dataset cannot be loaded"):
        records_of(str(tmp_path / "nowhere"), "train", "text")


@pytest.mark.parametrize("split", ["dev", "dev[:9]", "train+dev"])
def test_a_split_that_is_not_there_is_a_mistake(dataset: str, split: str) -> None:
    with pytest.raises(EspalierError) as caught:
        records_of(dataset, split, "note")
    assert (
        str(caught.value)
        == f"data.hub-split: the dataset {dataset!r} has no split 'dev', only 'train'; "
        "set it to one of these, or to several joined by +"
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            [{"role": "user", "content": "Anna K."}],
            "a list; write it as a string",
        ),
        ({"content": "Anna K."}, "an object; write it as a string"),
        (None, "null; remove the records without text"),
        (7, "a number;"),
        (True, "a boolean;"),
    ],
)
def test_nothing_is_made_text_that_is_none(
    value: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"note": "birch", "ward": "a"}, {"note": value, "ward": "a"}]
    made = datasets.Dataset.from_list(rows if value is None else rows[1:])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    with pytest.raises(EspalierError) as caught:
        records_of("trees", "train", "note", "ward")
    row = 2 if value is None else 1
    expected = f"the dataset 'trees' (train): row {row}, field 'note' is not a string but {told}"
    assert str(caught.value).startswith(expected)
    assert "Anna" not in str(caught.value)


@pytest.mark.parametrize("label", [None, [1], {"a": 1}, float("nan")])
def test_nothing_is_made_a_label_that_is_none(label: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = datasets.Dataset.from_list([{"note": "birch", "ward": label}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    with pytest.raises(
        EspalierError,
        match=r"^the dataset 'trees' \(train\): row 1, field 'ward' is not a label but ",
    ):
        records_of("trees", "train", "note", "ward")
    assert [record.label for record in records_of("trees", "train", "note")] == [""]
