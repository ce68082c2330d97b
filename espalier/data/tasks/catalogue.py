"""Catalogue of all tasks.

A new task is a function from a record's fields to an item, and an entry in ``TASKS``.
"""

from espalier.data.tasks.classification import BOOLQ, MNLI, SST2
from espalier.data.tasks.endings import HELLASWAG, PIQA, WINOGRANDE
from espalier.data.tasks.lettered import ARC_CHALLENGE, ARC_EASY, MMLU, OPENBOOKQA
from espalier.data.tasks.task import Task
from espalier.data.tasks.written import ALPACA, DOLLY, GSM8K
from espalier.errors import InputError

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        SST2, MNLI, BOOLQ,
        ARC_EASY, ARC_CHALLENGE, OPENBOOKQA, MMLU,
        PIQA, HELLASWAG, WINOGRANDE,
        GSM8K, DOLLY, ALPACA,
    )
}  # fmt: skip


def task_named(name: str) -> Task:
    """Return a task by its name; raise ``InputError`` if the name is unknown."""
    if name not in TASKS:
        raise InputError(f"task: {name!r} is unknown; choose one of {', '.join(TASKS)}")
    return TASKS[name]
