"""All tasks by name. A new task goes into ``TASKS`` of the module of its kind."""

from espalier.data.tasks import classification, endings, lettered, written
from espalier.data.tasks.task import Task
from espalier.errors import InputError

TASKS: dict[str, Task] = {
    task.name: task for kind in (classification, lettered, endings, written) for task in kind.TASKS
}


def task_named(name: str) -> Task:
    """Return a task by its name; raise ``InputError`` if the name is unknown."""
    if name not in TASKS:
        raise InputError(f"task: {name!r} is unknown; choose one of {', '.join(TASKS)}")
    return TASKS[name]
