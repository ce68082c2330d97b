"""Tasks of one's own: a prompt template, and a written answer or one of listed labels."""

from collections.abc import Sequence
from dataclasses import replace

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Hub, Task
from espalier.settings.own_task import CLASSIFICATION, COMPLETION, prompt_fields, prompt_text


def completion(template: str) -> Task:
    """Return the task of writing a record's ``answer`` after its prompt."""

    def item(record: Fields) -> Item:
        prompt = _prompt(template, record)
        return Item((prompt,), (record.text("answer"),), 0, _delimiter(template))

    return Task(COMPLETION, Hub(""), ("loss",), item)


def classification(template: str, labels: Sequence[str]) -> Task:
    """Return the task of choosing a record's ``label`` after its prompt."""

    def item(record: Fields) -> Item:
        prompt = _prompt(template, record)
        label = record.place("label", labels)
        return Item(
            (prompt,), tuple(labels), label, _delimiter(template), labels[label], texts=(prompt,)
        )

    return Task(CLASSIFICATION, Hub(""), ("acc",), item, tuple(labels))


def _prompt(template: str, record: Fields) -> str:
    values = {name: record.text(name, may_be_blank=True) for name in prompt_fields(template)}
    return prompt_text(template).format_map(values)


def _delimiter(template: str) -> str:
    """Return the text between prompt and answer: a space, unless the prompt ends with one."""
    return "" if prompt_text(template)[-1:].isspace() else " "


TASKS = (
    replace(
        completion("{question}\n"),
        sample={"question": "Which tree bears acorns?", "answer": "Oak."},
    ),
    replace(
        classification("{text}\nIs this positive or negative?", ("negative", "positive")),
        sample={"text": "a gorgeous, witty, seductive movie", "label": "positive"},
    ),
)
"""The tasks with an example of a prompt; a run has its own."""
