"""Tasks with a prompt of one's own."""

from typing import Any

import pytest

from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.errors import EspalierError
from espalier.settings.run import RunSettings, parse

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
    ],
)
def test_prompt_and_answer(prompt: str, expected: tuple[str, str]) -> None:
    found = item(settings(prompt=prompt), question="oak?", about="{x}", answer="elm", other=3)
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
