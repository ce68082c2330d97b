"""Description of the tasks: fields, prompt and answer of a sample record, and scores.

    python -m espalier.data.tasks.description --write

writes docs/tasks.md. ``espalier tasks`` prints the same.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from espalier.data.tasks.catalogue import TASKS, task_named
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.task import Task
from espalier.errors import InputError

PAGE = "docs/tasks.md"
INTRODUCTION = """# Tasks

After reading this page you know which fields the records of a task need, what the model reads, and
how it is scored.

Written by `python -m espalier.data.tasks.description --write`; `espalier tasks` prints the same.
[Your own data](data.md) says in which files records may be, and how to map fields that have other
names.
"""

SCORES = {
    "acc": "accuracy over the options, by their log-likelihood",
    "acc_norm": "accuracy by log-likelihood per character",
    "exact_match": "share of generated answers that are correct",
    "loss": "mean loss per token of the answer",
}


def described(task: Task) -> Iterator[str]:
    """Yield the lines that describe a task."""
    item = task.item(Fields(task.sample, task.name))
    yield f"record   {json.dumps(task.sample, ensure_ascii=False)}"
    first, *others = item.prompt.split("\n")
    yield f"prompt   {first}"
    yield from (f"         {line}" for line in others)
    wrong = [text for place, text in enumerate(item.options) if place != item.answer]
    yield f"answer   => {item.gold!r}" + (f", not {', '.join(map(repr, wrong))}" if wrong else "")
    yield f"scores   {'; '.join(f'{name}: {SCORES[name]}' for name in task.metrics)}"
    if task.classes:
        yield f"encoder  classes {', '.join(task.classes)}"
    yield f"dataset  {task.hub.name} {task.hub.config}".rstrip()


def tasks_page() -> str:
    """Return the page as Markdown: a section per task."""
    sections = (
        "\n".join([f"## {task.name}", "", "```", *described(task), "```", ""])
        for task in TASKS.values()
    )
    return "\n".join([INTRODUCTION, *sections])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the named tasks, or all; with ``--write`` write the page instead."""
    names = sys.argv[1:] if arguments is None else arguments
    if list(names) == ["--write"]:
        (Path(__file__).parents[3] / PAGE).write_text(tasks_page())
        return
    for name in names or TASKS:
        print("\n".join([name, *(f"  {line}" for line in described(task_named(name))), ""]))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"espalier: {error}")
