"""Tasks with a prompt of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_items import client_items
from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.node import parse_node
from espalier.settings.run import RunSettings, parse
from espalier.training.sequences import client_sequences
from tests.data.files.written_files import SECRET, node
from tests.tiny_model import save_tiny_llama

FILES = {"method": "fedpetuning", "data.path": "unused.jsonl"}


def settings(**data: str) -> RunSettings:
    name = "classification" if "labels" in data else "completion"
    given = {f"data.{key}": value for key, value in data.items()}
    return parse(FILES | {"task.name": name} | given, simulation=True, by_hand=list(given))


def item(chosen: RunSettings, **record: Any) -> Item:
    return task_of(chosen).item(Fields(record, "here"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("{question}\n", ("oak?\n", "elm")),
        ("{question}\\n", ("oak?\n", "elm")),
        ("Q: {question} ({about})\nA:", ("Q: oak? ({x})\nA:", " elm")),
        ("{{{question}}}", ("{oak?}", " elm")),
        ("{0}", ("zero", " elm")),
    ],
)
def test_prompt_and_answer(prompt: str, expected: tuple[str, str]) -> None:
    found = item(
        settings(prompt=prompt), question="oak?", about="{x}", answer="elm", **{"0": "zero"}
    )
    assert found.requests == (expected,)
    assert found.answer == 0


def test_labels_are_the_options() -> None:
    chosen = settings(prompt="{note}\nUrgent?", labels="no, yes,later")
    for label, place in (("yes", 1), (2, 2), ("later", 2)):
        found = item(chosen, note="oak", label=label)
        assert found.requests == tuple(
            ("oak\nUrgent?", f" {name}") for name in ("no", "yes", "later")
        )
        assert (found.answer, found.label, found.texts) == (place, found.gold, ("oak\nUrgent?",))
    assert chosen.num_classes == 3
    quoted = settings(prompt="{note}", labels='no,"yes, soon"')
    assert item(quoted, note="oak", label="yes, soon").answer == 1
    assert task_of(chosen).classes == ("no", "yes", "later")
    with pytest.raises(
        EspalierError, match="field 'label' is not one of the labels no, yes, later"
    ):
        item(chosen, note="oak", label="hawthorn")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"prompt": ""}, r"data\.prompt = '': task\.name = 'completion' needs it"),
        ({"prompt": "no field"}, r"data\.prompt = 'no field': names no field of a record"),
        ({"prompt": "{"}, r"data\.prompt = '{': .*write \{\{ and \}\} for braces"),
        ({"prompt": "{a.b}"}, "braces may hold the name of a field only"),
        ({"prompt": "{a!r}"}, "braces may hold the name of a field only"),
        ({"prompt": "{a[0]}"}, "braces may hold the name of a field only"),
        ({"prompt": "{a:>9}"}, "braces may hold the name of a field only"),
        ({"prompt": "{}"}, "braces may hold the name of a field only"),
        ({"prompt": "{a} {answer}"}, "contains the field 'answer', which the model must give"),
        ({"prompt": "{label}", "labels": "a,b"}, "contains the field 'label', which the model"),
        ({"prompt": "{a}", "labels": ""}, r"data\.labels = '': task\.name = 'classification'"),
        ({"prompt": "{a}", "labels": "yes"}, "at least two different labels"),
        ({"prompt": "{a}", "labels": "yes,,no"}, "at least two different labels"),
        ({"prompt": "{a}", "labels": "yes,yes"}, "at least two different labels"),
    ],
)
def test_a_wrong_prompt_or_label_list_is_refused(data: dict[str, str], error: str) -> None:
    with pytest.raises(EspalierError, match=error):
        settings(**data)


def test_other_tasks_do_not_read_prompt_and_labels() -> None:
    for key in ("data.prompt", "data.labels"):
        with pytest.raises(EspalierError, match=f"{key} = '.*does not read it"):
            parse(FILES | {"task.name": "dolly", key: "{a},b"}, by_hand=[key])


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        ("false,true", {False: 0, True: 1, "true": 1}),
        ("1,0", {1: 0, 0: 1, "1": 0}),
        ("1,2,3", {1: 0, 3: 2, 2.0: 1}),
        ("soft,hard", {0: 0, 1.0: 1, "hard": 1}),
    ],
)
def test_the_text_of_a_label_comes_before_its_number(labels: str, values: dict[Any, int]) -> None:
    chosen = settings(prompt="{note}", labels=labels)
    for value, place in values.items():
        assert item(chosen, note="oak", label=value).answer == place


@pytest.mark.parametrize(
    ("labels", "value"),
    [
        ("yes,no", True), ("1,2,3", 0), ("1,2", 1.5), ("None,yes", None), ("nan,yes", float("nan")),
        ("['a'],b", ["a"]), ("yes,no", ""),
    ],
)  # fmt: skip
def test_a_value_that_is_no_label_is_refused(labels: str, value: Any) -> None:
    with pytest.raises(EspalierError, match="field 'label' is not one of the labels"):
        item(settings(prompt="{note}", labels=labels), note="oak", label=value)


def test_labels_of_truth_values_are_told() -> None:
    with pytest.raises(EspalierError, match=r"set data\.labels=false,true, or"):
        item(settings(prompt="{note}", labels="yes,no"), note="oak", label=True)


def test_null_in_a_prompt_is_refused() -> None:
    with pytest.raises(EspalierError, match="field 'question' is null; give it text"):
        item(settings(prompt="{question}"), question=None, answer="elm")


def test_a_prompt_without_any_text_is_refused() -> None:
    """CSV writes null as an empty field."""
    chosen = settings(prompt="{question} {context}")
    assert item(chosen, question="why?", context="", answer="oak").prompt == "why? "
    with pytest.raises(EspalierError, match=r"has no text in the fields that data\.prompt names"):
        item(chosen, question="", context=" ", answer="oak")


def test_a_field_that_the_prompt_misspells_is_told() -> None:
    told = r"has no field 'Question', which data\.prompt names, it has the fields question"
    with pytest.raises(EspalierError, match=told):
        item(settings(prompt="{Question}"), question="why?", answer="oak")


def test_a_prompt_cannot_read_the_field_of_the_answer() -> None:
    told = "field 'reply' is read as the task's field 'answer', which a prompt cannot read"
    record = Fields({"question": "why?", "reply": SECRET}, "here", {"answer": "reply"})
    with pytest.raises(EspalierError, match=told) as caught:
        task_of(settings(prompt="{question}{reply}")).item(record)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("ref=answer", "field 'answer' is read as the task's field 'ref'; name another one"),
        ("ref=note,answer=note", "'ref' and 'answer' both name the field 'note'; name another one"),
    ],
)
def test_the_answer_is_not_put_into_the_prompt(columns: str, told: str, tmp_path: Path) -> None:
    """Whatever name the settings give it."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "why?", "answer": SECRET, "note": SECRET}))
    chosen = settings(prompt="{question} {ref}", path=str(path), columns=columns)
    owner = {"data-path": str(path), "data-task": "completion", "data-columns": columns}
    site = {"site": "a", "state-dir": str(tmp_path)} | owner
    site["data-columns"] += ",question=question"
    for client in (node(tmp_path), parse_node(site)):
        with pytest.raises(EspalierError, match=told) as refused:
            client_items(chosen, client, 0)
        assert SECRET not in str(refused.value)


def test_a_site_names_the_fields_that_a_prompt_may_read(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    rows = [{"q": f"oak {number}", "ssn": "7", "answer": "elm"} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"site": "a", "data-path": str(file), "data-task": "completion", "min-tokens": 1}
    node = parse_node(own | {"data-columns": "question=q"})
    train, _ = client_items(settings(prompt="{question}"), node, 0)
    assert train[0].prompt.startswith("oak")
    with pytest.raises(EspalierError, match="names 'ssn', which this site's data-columns"):
        client_items(settings(prompt="{question}{ssn}"), node, 0)


def test_a_long_prompt_does_not_replace_data(tmp_path: Path) -> None:
    """A record counts in ``min-tokens`` for at most as many tokens as it has characters."""
    file = tmp_path / "records.jsonl"
    rows = [{"question": f"oak {number:02}", "answer": "elm"} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"site": "a", "data-path": str(file), "data-task": "completion", "min-tokens": 1}
    node = parse_node(own | {"data-columns": "question=question"})
    model = OpenedModel(save_tiny_llama(tmp_path / "model"))
    for prompt, expected in (("{question}\n", None), ("x y " * 50 + "{question}\n", 9)):
        sequences = client_sequences(settings(prompt=prompt), node, model, 0)
        found = list(sequences.tokens([0, 1, 2]))
        assert all(tokens <= 9 for tokens in found)
        assert expected is None or found == [expected] * 3
