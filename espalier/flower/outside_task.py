"""Messages in programs that Flower did not start: tests and measurements that play all nodes themselves."""

from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 1


def play_task() -> None:
    """Let this process make messages, as a task of run 1; one that is a task already stays it.

    A ``Message`` notes the run of the task in which it is made, and raises RuntimeError where there is none.
    """
    try:
        TaskIdentity.run_id  # noqa: B018  # raises where none is set
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = RUN_ID
        TaskIdentity.node_id = 0
