"""Files and datasets of items; an error names line and field and quotes no content."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items, public_items
from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.scored_items import scored_items
from espalier.data.tasks.task_source import ItemSource, hub_rows, items_in
from espalier.errors import EspalierError
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse

SECRET = "hawthorn"
GOOD: dict[str, dict[str, Any]] = {
    "sst2": {"sentence": SECRET, "label": 0},
    "mnli": {"premise": SECRET, "hypothesis": SECRET, "label": "neutral"},
    "boolq": {"passage": SECRET, "question": SECRET, "answer": False},
    "arc-easy": {
        "question": SECRET,
        "choices": {"text": [SECRET, "b"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "openbookqa": {
        "question_stem": SECRET,
        "choices": {"text": [SECRET, "b"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "mmlu": {
        "question": SECRET,
        "choices": [SECRET, "b", "c", "d"],
        "answer": 0,
        "subject": "botany",
    },
    "piqa": {"goal": SECRET, "sol1": SECRET, "sol2": "b", "label": 0},
    "hellaswag": {
        "activity_label": SECRET,
        "ctx": SECRET,
        "endings": [SECRET, "b", "c", "d"],
        "label": 0,
    },
    "winogrande": {"sentence": f"{SECRET} _ grew", "option1": "a", "option2": "b", "answer": "1"},
    "gsm8k": {"question": SECRET, "answer": f"{SECRET} #### 3"},
    "dolly": {"instruction": SECRET, "context": "", "response": SECRET, "category": "open_qa"},
    "alpaca": {"instruction": SECRET, "input": "", "output": SECRET},
}


def write(folder: Path, *records: Any) -> str:
    file = folder / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


OPTIONAL = {("dolly", "context"), ("dolly", "category"), ("alpaca", "input")}
"""Task and field that a record may lack."""


@pytest.mark.parametrize(("task", "field"), sorted(OPTIONAL))
def test_optional_field_may_be_missing_or_empty(task: str, field: str, tmp_path: Path) -> None:
    lacking = {name: value for name, value in GOOD[task].items() if name != field}
    empty = GOOD[task] | {field: None}
    first, second = items_in(TASKS[task], write(tmp_path, lacking, empty)).items()
    assert replace(first, where="") == replace(second, where="")


@pytest.mark.parametrize("task", GOOD)
def test_missing_field_is_named_with_its_line(task: str, tmp_path: Path) -> None:
    for field in GOOD[task]:
        if (task, field) in OPTIONAL:
            continue
        lacking = {name: value for name, value in GOOD[task].items() if name != field}
        asked = {"answer": "label"}.get(field, field) if task == "boolq" else field
        with pytest.raises(
            EspalierError, match=rf"items.jsonl: line 2 \(task {task}\) has no field '{asked}'"
        ) as refused:
            list(items_in(TASKS[task], write(tmp_path, GOOD[task], lacking)).items())
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("task", GOOD)
def test_wrong_field_type_is_not_quoted(task: str, tmp_path: Path) -> None:
    for field in GOOD[task]:
        for wrong in (None, 17, 0.5, -1, [SECRET], {"x": SECRET}, f" {SECRET} \ud800", []):
            record = GOOD[task] | {field: wrong}
            if wrong is None and (task, field) in OPTIONAL | {("mmlu", "subject")}:
                continue
            with pytest.raises(
                EspalierError, match=rf"line 1 \(task {task}\).*'[a-zA-Z_0-9]+'"
            ) as refused:
                list(items_in(TASKS[task], write(tmp_path, record)).items())
            assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("task", "changed", "why"),
    [
        (
            "sst2",
            {"label": -1},
            (
                "field 'label' is not one of the labels negative, positive"
                " and not a number from 0 to 1"
            ),
        ),
        # Python refuses to convert a string with this many digits.
        ("sst2", {"label": "1" * 5000}, "field 'label' is not one of the labels"),
        (
            "sst2",
            {"label": -1},
            ("but a negative number, as in splits whose labels are not published; give the record"),
        ),
        ("sst2", {"label": None}, "not a number from 0 to 1, but null"),
        ("sst2", {"label": 0.5}, "not a number from 0 to 1, but a number"),
        ("sst2", {"label": [SECRET]}, "not a number from 0 to 1, but a list"),
        ("sst2", {"label": SECRET}, "not a number from 0 to 1, but a string"),
        ("sst2", {"sentence": [SECRET]}, "field 'sentence' is not a string but a list"),
        (
            "mmlu",
            {"choices": []},
            "field 'choices' is not a list with at least one element but an empty one",
        ),
        ("mmlu", {"choices": ["a", "b", "c", None]}, "field 'choices' is not a string but null"),
        ("arc-easy", {"question": {"stem": "a", "choices": ["b"]}}, "item 1 is a string"),
        ("hellaswag", {"label": ""}, "field 'label' is not one of the labels"),
        ("winogrande", {"answer": "3"}, "not a number from 1 to 2"),
        ("winogrande", {"sentence": "no gap"}, "has no gap '_' with text after it"),
        (
            "arc-easy",
            {"answerKey": "E"},
            "field 'answerKey' is not the label of one of the choices",
        ),
        ("mmlu", {"choices": ["a"]}, "does not have four texts"),
        ("gsm8k", {"answer": "three"}, "does not end with '#### ' and a number"),
        ("dolly", {"response": " \n"}, "field 'response' is blank"),
    ],
)
def test_a_label_or_text_that_will_not_do(
    task: str, changed: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(EspalierError) as refused:
        list(items_in(TASKS[task], write(tmp_path, GOOD[task], GOOD[task] | changed)).items())
    assert f"line 2 (task {task})" in str(refused.value)
    assert why in str(refused.value)


def test_present_fields_are_told_beside_missing(tmp_path: Path) -> None:
    told = (
        r"line 1 \(task sst2\) has no field 'sentence', it has the fields text \(a string\), label"
        r" \(a number\); check"
    )
    with pytest.raises(EspalierError, match=told):
        list(items_in(TASKS["sst2"], write(tmp_path, {"text": SECRET, "label": 1})).items())


def test_overlong_option_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD["piqa"], GOOD["piqa"] | {"sol1": "x" * 40})
    items = list(items_in(TASKS["piqa"], path).items())
    told = (
        rf"{path}: line 2 \(task piqa\): an answer has 41 tokens, but only 19 fit .*; raise"
        r" task.max-test-tokens"
    )
    with pytest.raises(EspalierError, match=told):
        scored_items(TASKS["piqa"], items, lambda text: list(text.encode()), 20)


def test_lines_that_are_not_records(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    for line, why in ((SECRET, "is not JSON"), (f'["{SECRET}"]', "is not a JSON object")):
        file.write_text(f"\n{line}\n")
        with pytest.raises(EspalierError, match=f"items.jsonl: line 2 {why}") as refused:
            list(items_in(TASKS["sst2"], str(file)).items())
        assert SECRET not in str(refused.value)
    with pytest.raises(EspalierError, match=r"no such file; check data\.path"):
        list(items_in(TASKS["sst2"], str(tmp_path / "nowhere")).items())


def test_unicode_separators_do_not_split_lines(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(
        '{"sentence": "one\u2028two", "label": 1}\r\n\n{"sentence": "three", "label": 0}\n',
        encoding="utf-8",
    )
    assert [item.texts for item in items_in(TASKS["sst2"], str(file)).items()] == [
        ("one\u2028two",),
        ("three",),
    ]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "trees"
    folder.mkdir()
    records = [
        {"sentence": f"tree {number}", "label": number % 2 if number < 5 else -1}
        for number in range(6)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder)


def test_a_dataset_is_read_like_a_file(dataset: str) -> None:
    task = TASKS["sst2"]
    items = ItemSource(task, (hub_rows(task, "train", dataset, ""),)).items()
    assert [next(items).label for _ in range(5)] == [
        "negative",
        "positive",
        "negative",
        "positive",
        "negative",
    ]
    with pytest.raises(
        EspalierError,
        match=r"trees' \(train\): row 6 \(task sst2\), field 'label' is not one of the labels",
    ):
        next(items)


def test_a_dataset_that_is_not_there_is_a_mistake(dataset: str) -> None:
    with pytest.raises(EspalierError, match="the dataset cannot be loaded"):
        hub_rows(TASKS["sst2"], "train", f"{dataset}/nowhere", "").state()


def hub_run(**changes: Any) -> RunSettings:
    """Return settings of a run on sst2 from the Hub with changed keys.

    In a key, two underscores stand for a dot and one for a hyphen.
    """
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return parse({"method": "fedpetuning", "task.name": "sst2", "data.source": "hub"} | given)


def test_missing_split_names_its_setting(dataset: str) -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"^data\.hub-split: the dataset '.*trees' has no split 'dev', only 'train'; set it to"
        ),
    ):
        client_items(hub_run(data__path=dataset, data__hub_split="dev"), simulated_node(), 0)
    with pytest.raises(
        EspalierError,
        match=(
            r"^task\.test-path = '': the dataset '.*trees' has no split 'validation', only"
            r" 'train'; .*"
        ),
    ):
        public_items(hub_run(data__path=dataset))


def test_missing_default_dataset_names_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")

    def load(name: str, config: str | None, split: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for read in (
        lambda: client_items(hub_run(), simulated_node(), 0),
        lambda: public_items(hub_run()),
    ):
        with pytest.raises(
            EspalierError,
            match=(
                r"^task.name = 'sst2': its dataset 'nyu-mll/glue' cannot be loaded: ConnectionError"
            ),
        ):
            read()
    with pytest.raises(
        EspalierError,
        match=r"^data.path = 'trees': the dataset cannot be loaded: ConnectionError: no network",
    ):
        public_items(hub_run(data__path="trees"))


@pytest.mark.parametrize("task", sorted(name for name, task in TASKS.items() if task.hub.name))
@pytest.mark.parametrize("named", ["", "some-split"])
def test_default_training_split_is_the_task_s_own(
    task: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only mmlu has no split that is called train."""
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    asked = []

    def load(name: str, config: str | None, split: str) -> None:
        asked.append((name, config, split))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    flat = {
        "method": "fedpetuning",
        "task.name": task,
        "data.source": "hub",
        "data.hub-split": named,
    }
    with pytest.raises(EspalierError, match="cannot be loaded"):
        client_items(parse(flat), simulated_node(), 0)
    hub = TASKS[task].hub
    own = "auxiliary_train" if task == "mmlu" else "train"
    assert asked == [(hub.name, hub.config or None, named or own)]
