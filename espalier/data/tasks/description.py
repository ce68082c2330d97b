"""Description of the tasks: fields, prompt and answer of a sample record, and scores.

    python -m espalier.data.tasks.description

writes docs/reference/tasks.md. ``espalier tasks`` prints the same.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Template

from espalier.data.tasks.catalogue import TASKS, task_named
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.task import Task
from espalier.errors import as_command
from espalier.settings.tables.task import CHAT_TEMPLATES

PAGE = "docs/reference/tasks.md"
INTRODUCTION = """# Tasks

After reading this page you can write the records that a task needs, \
and say what the model reads and
how it is scored.

Written by `python -m espalier.data.tasks.description`; `espalier tasks` prints the same.
[Your own data](../how-to/data.md) says in which files records may be, \
and how to map fields that have other
names.
"""

SCORES = {
    "acc": "accuracy over the options, by their log-likelihood",
    "acc_norm": "accuracy by log-likelihood per character",
    "exact_match": "fraction of generated answers that are correct",
    "loss": "mean loss per token of the answer",
}


def described(task: Task) -> Iterator[str]:
    """Yield the lines that describe a task."""
    item = task.item(Fields(task.sample, task.name))
    yield f"record   {json.dumps(task.sample, ensure_ascii=False)}"
    for other in task.other_samples:
        yield f"or       {json.dumps(other, ensure_ascii=False)}"
    if task.values:
        yield f"fields   {task.values}"
    if item.conversation is None:
        yield from _in_lines("prompt", item.prompt)
        wrong = [text for place, text in enumerate(item.options) if place != item.answer]
        others = f", not {', '.join(map(repr, wrong))}" if wrong else ""
        yield f"answer   => {item.gold!r}{others}"
    else:
        rows = [{"role": role, "content": text} for role, text in item.conversation.messages]
        rendered = Template(CHAT_TEMPLATES["chatml"]).render(messages=rows)
        yield from _in_lines("text", rendered.rstrip())
        yield "         (with the chat template chatml; the loss is on what the assistant says)"
    yield f"scores   {'; '.join(f'{name}: {SCORES[name]}' for name in task.metrics)}"
    if task.classes:
        yield f"encoder  classes {', '.join(task.classes)}"
    if task.hub.name:
        yield f"dataset  {task.hub.name} {task.hub.config}".rstrip()


def _in_lines(title: str, text: str) -> Iterator[str]:
    """Yield a text line by line, the first after a title."""
    first, *others = text.split("\n")
    yield f"{title:<8} {first}".rstrip()
    yield from (f"         {line}".rstrip() for line in others)


def tasks_page() -> str:
    """Return the page as Markdown: a section per task."""
    sections = (
        "\n".join([f"## {task.name}", "", "```", *described(task), "```", ""])
        for task in TASKS.values()
    )
    return "\n".join([INTRODUCTION, *sections])


@as_command
def main(names: Sequence[str]) -> None:
    """Print the named tasks, or all."""
    for task in [task_named(name) for name in names or TASKS]:
        print("\n".join([task.name, *(f"  {line}".rstrip() for line in described(task)), ""]))


if __name__ == "__main__":
    (Path(__file__).parents[3] / PAGE).write_text(tasks_page())
