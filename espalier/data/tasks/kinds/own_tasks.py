"""Tasks of one's own: a prompt template, and a written answer or one of listed labels."""

from collections.abc import Sequence
from dataclasses import replace
from string import Formatter

from espalier.data.tasks.fields import GIVE_TEXT, Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Hub, Task
from espalier.settings.tables.data import CLASSIFICATION, COMPLETION, prompt_fields, prompt_text


def completion(template: str) -> Task:
    """Return the task of writing a record's ``answer`` after its prompt."""

    def item(record: Fields) -> Item:
        prompt, characters = _prompt(template, record)
        answer = record.text("answer")
        own = characters + len(answer)
        return Item((prompt,), (answer,), 0, _delimiter(template), own_characters=own)

    return Task(
        COMPLETION, Hub(""), ("loss",), item, other_fields=(*prompt_fields(template), "answer")
    )


def classification(template: str, labels: Sequence[str]) -> Task:
    """Return the task of choosing a record's ``label`` after its prompt."""

    def item(record: Fields) -> Item:
        prompt, characters = _prompt(template, record)
        label = record.listed("label", labels)
        return Item(
            (prompt,),
            tuple(labels),
            label,
            _delimiter(template),
            labels[label],
            texts=(prompt,),
            # The labels are the run's, so the answer counts as one character of the record.
            own_characters=characters + 1,
        )

    return Task(
        CLASSIFICATION,
        Hub(""),
        ("acc",),
        item,
        tuple(labels),
        other_fields=(*prompt_fields(template), "label"),
    )


def _prompt(template: str, record: Fields) -> tuple[str, int]:
    """Return a record's prompt, and how many of its characters are from the record."""
    parts = []
    characters = 0
    is_blank = True
    for text, name, _, _ in Formatter().parse(prompt_text(template)):
        parts.append(text)
        if name is None:
            continue
        if reader := record.read_as(name):
            raise record.refused(
                name,
                f"is read as the task's field '{reader}', which a prompt cannot read",
                f"leave {{{name}}} out of data.prompt, or name another field for '{reader}' in"
                " data.columns (at a site: data-columns)",
            )
        if name not in record:
            raise record.refused_whole(
                f"has no field '{name}', which data.prompt names",
                "correct data.prompt and the case of its letters, or name the field in data.columns"
                " (at a site: data-columns)",
            )
        if record.is_null(name):
            raise record.refused(name, "is null", GIVE_TEXT)
        value = record.text(name, may_be_blank=True)
        parts.append(value)
        characters += len(value)
        is_blank = is_blank and not value.strip()
    if is_blank:
        raise record.refused_whole("has no text in the fields that data.prompt names", GIVE_TEXT)
    return "".join(parts), characters


def _delimiter(template: str) -> str:
    """Return the text between prompt and answer: a space, unless the prompt ends with one."""
    return "" if prompt_text(template)[-1:].isspace() else " "


TASKS = (
    replace(
        completion("{question}\n"),
        values="those that data.prompt names in braces (here {question}), and answer",
        sample={"question": "Which tree bears acorns?", "answer": "Oak."},
    ),
    replace(
        classification("{text}\nIs this positive or negative?", ("negative", "positive")),
        values="those that data.prompt names in braces (here {text}), and label, one of"
        " data.labels",
        sample={"text": "a gorgeous, witty, seductive movie", "label": "positive"},
    ),
)
"""The tasks with an example of a prompt; a run has its own."""
