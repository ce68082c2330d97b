"""Files and datasets of items; an error names line and field and quotes no content."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items, public_items
from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.reading import read_hub_items, read_items
from espalier.data.tasks.scored_items import scored_items
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


@pytest.mark.parametrize("task", GOOD)
def test_a_field_that_is_missing_is_named_with_its_line(task: str, tmp_path: Path) -> None:
    for field in GOOD[task]:
        lacking = {name: value for name, value in GOOD[task].items() if name != field}
        asked = {"answer": "label"}.get(field, field) if task == "boolq" else field
        with pytest.raises(
            EspalierError, match=rf"items.jsonl: line 2 \(task {task}\) has no field '{asked}'"
        ) as refused:
            list(read_items(TASKS[task], write(tmp_path, GOOD[task], lacking)))
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("task", GOOD)
def test_a_field_of_another_kind_is_a_mistake_that_quotes_nothing(
    task: str, tmp_path: Path
) -> None:
    for field in GOOD[task]:
        for wrong in (None, 17, 0.5, -1, [SECRET], {"x": SECRET}, f" {SECRET} \ud800", []):
            record = GOOD[task] | {field: wrong}
            if wrong is None and (task, field) in {
                ("dolly", "context"),
                ("alpaca", "input"),
                ("mmlu", "subject"),
            }:
                continue
            with pytest.raises(
                EspalierError, match=rf"line 1 \(task {task}\).*'[a-zA-Z_0-9]+'"
            ) as refused:
                list(read_items(TASKS[task], write(tmp_path, record)))
            assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("task", "changed", "why"),
    [
        (
            "sst2",
            {"label": -1},
            "field 'label' is not one of the labels negative, positive and not a number from 0 to 1",
        ),
        # Python refuses to convert a string with this many digits.
        ("sst2", {"label": "1" * 5000}, "field 'label' is not one of the labels"),
        (
            "sst2",
            {"label": -1},
            ("but a negative number, as in splits whose labels are not published; give the record"),
        ),
        ("sst2", {"label": None}, "not a number from 0 to 1, but null"),
        ("sst2", {"label": 1.0}, "not a number from 0 to 1, but a number"),
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
        list(read_items(TASKS[task], write(tmp_path, GOOD[task], GOOD[task] | changed)))
    assert f"line 2 (task {task})" in str(refused.value)
    assert why in str(refused.value)


def test_fields_that_there_are_stand_beside_the_one_that_is_missing(tmp_path: Path) -> None:
    told = (
        r"line 1 \(task sst2\) has no field 'sentence', it has the fields text \(a string\), label"
        r" \(a number\); check"
    )
    with pytest.raises(EspalierError, match=told):
        list(read_items(TASKS["sst2"], write(tmp_path, {"text": SECRET, "label": 1})))


def test_an_option_that_is_too_long_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD["piqa"], GOOD["piqa"] | {"sol1": "x" * 40})
    items = list(read_items(TASKS["piqa"], path))
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
            list(read_items(TASKS["sst2"], str(file)))
        assert SECRET not in str(refused.value)
    with pytest.raises(EspalierError, match=r"no such file; check data\.path"):
        list(read_items(TASKS["sst2"], str(tmp_path / "nowhere")))


def test_line_separators_within_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(
        '{"sentence": "one\u2028two", "label": 1}\r\n\n{"sentence": "three", "label": 0}\n',
        encoding="utf-8",
    )
    assert [item.texts for item in read_items(TASKS["sst2"], str(file))] == [
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
    items = read_hub_items(TASKS["sst2"], "train", dataset)
    assert [next(items).label for _ in range(5)] == [
        "negative",
        "positive",
        "negative",
        "positive",
        "negative",
    ]
    with pytest.raises(
        EspalierError,
        match=r"trees \(train\): record 6 \(task sst2\), field 'label' is not one of the labels",
    ):
        next(items)


def test_a_dataset_that_is_not_there_is_a_mistake(dataset: str) -> None:
    with pytest.raises(EspalierError, match="the dataset cannot be loaded"):
        list(read_hub_items(TASKS["sst2"], "train", f"{dataset}/nowhere"))


def hub_run(**changes: Any) -> RunSettings:
    """Return settings of a run on sst2 from the Hub with changed keys.

    In a key, two underscores stand for a dot and one for a hyphen.
    """
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return parse({"method": "fedpetuning", "task.name": "sst2", "data.source": "hub"} | given)


def test_a_split_that_the_dataset_lacks_is_told_by_the_key_that_asks_for_it(dataset: str) -> None:
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


def test_a_dataset_that_no_key_names_is_told_by_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("named", ["", "some-split"])
def test_clients_train_on_the_tasks_own_split_unless_the_run_names_one(
    task: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only mmlu has no split that is called train."""
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    asked = []

    def load(name: str, config: str | None, split: str) -> list[Any]:
        asked.append((name, config, split))
        return []

    monkeypatch.setattr(datasets, "load_dataset", load)
    flat = {
        "method": "fedpetuning",
        "task.name": task,
        "data.source": "hub",
        "data.hub-split": named,
    }
    with pytest.raises(EspalierError, match="no training items of the task"):
        client_items(parse(flat), simulated_node(), 0)
    hub = TASKS[task].hub
    own = "auxiliary_train" if task == "mmlu" else "train"
    assert asked == [(hub.name, hub.config or None, named or own)]


def test_simulated_clients_of_a_process_read_their_file_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{SECRET} number {n}" for n in range(60)]
    path = write(tmp_path, *({"sentence": word, "label": 0} for word in words[:40]))
    settings = hub_run(data__source="jsonl", data__path=path, num_clients=3)
    read: list[str] = []
    monkeypatch.setattr(
        "espalier.data.client_items.read_items",
        lambda task, path: read.append(path) or read_items(task, path),
    )

    def of_all() -> list[str]:
        own = [client_items(settings, simulated_node(), client) for client in range(3)]
        return sorted(item.texts[0] for parts in own for part in parts for item in part)

    assert of_all() == of_all() == sorted(words[:40])
    assert read == [path]
    write(tmp_path, *({"sentence": word, "label": 0} for word in words))
    assert of_all() == sorted(words)
    assert read == [path, path]
