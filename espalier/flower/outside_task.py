"""Messages in programs that Flower did not start: tests and benchmarks that run all nodes."""

from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 1


def play_task() -> None:
    """Let this process create messages as if it were a task of run 1, unless it is a task already.

    A ``Message`` records the run of the task that creates it, and raises RuntimeError without a
    task.
    """
    try:
        # The access raises if no run is set.
        TaskIdentity.run_id  # noqa: B018
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = RUN_ID
        TaskIdentity.node_id = 0
