"""All tasks by name. A new task goes into ``TASKS`` of the module of its kind."""

from espalier.data.tasks.kinds import (
    chat,
    classification,
    continuations,
    lettered_choices,
    own_tasks,
    written_answers,
)
from espalier.data.tasks.task import Task
from espalier.errors import InputError
from espalier.settings.run import RunSettings
from espalier.settings.tables.data import CLASSIFICATION, COMPLETION, listed_labels

KINDS = (classification, lettered_choices, continuations, written_answers, chat, own_tasks)
TASKS: dict[str, Task] = {task.name: task for kind in KINDS for task in kind.TASKS}


def task_named(name: str) -> Task:
    """Return a task by its name; raise ``InputError`` if the name is unknown."""
    if name not in TASKS:
        raise InputError(f"task: {name!r} is unknown; choose one of {', '.join(TASKS)}")
    return TASKS[name]


def task_of(settings: RunSettings) -> Task:
    """Return the task of a run; prompt and labels of one's own are those of ``[data]``."""
    data = settings.data
    if settings.task.name == COMPLETION:
        return own_tasks.completion(data.prompt)
    if settings.task.name == CLASSIFICATION:
        return own_tasks.classification(data.prompt, listed_labels(data.labels))
    return task_named(settings.task.name)
