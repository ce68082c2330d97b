"""Detection of a process that plays a node of a simulation.

A simulated node has nothing of its own: the run's settings define its data, and no limit of a site
applies. A real node must therefore never count as simulated. Flower's simulation runs every
ClientApp in a Ray actor. A SuperNode starts ``flwr-clientapp``, which never starts Ray.

Covers: the type of the process, regardless of the run's settings and the node's configuration
(including ``partition-id``). If the type is unknown, the node counts as real.

Does not cover: a program that starts Ray itself, or that reports another type. The run's submitter
sends the program.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from espalier.flower.shared_nodes import play_task, taken_out

_PLAYED: ContextVar[bool] = ContextVar("played", default=False)


def in_simulation() -> bool:
    """Return whether this process is a Ray actor, or plays a node itself."""
    return _PLAYED.get() or _is_ray_actor()


def as_played(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let a simulated node answer as the client that the message names (Flower mod).

    A real node ignores that name.
    """
    # A simulated node answers for whichever client the message names.
    if in_simulation() and message.has_content() and (played := taken_out(message.content)):
        config = {**context.node_config, **played}
        context = Context(
            context.run_id, context.node_id, config, context.state, context.run_config
        )
    return call_next(message, context)


@contextmanager
def playing_a_node() -> Iterator[None]:
    """Treat the code of the ``with`` block as a simulation.

    Programs that call the ClientApp themselves, such as tests and benchmarks, need this.
    """
    play_task()
    token = _PLAYED.set(True)
    try:
        yield
    finally:
        _PLAYED.reset(token)


def _is_ray_actor() -> bool:
    """Return whether this process is a Ray actor, in which Ray is always imported."""
    # ``sys.modules``: importing Ray here would load it in every process.
    ray = sys.modules.get("ray")
    try:
        return (
            ray is not None
            and ray.is_initialized()
            and ray.get_runtime_context().get_actor_id() is not None
        )
    # Any error of Ray means that this process is not known to be an actor.
    except Exception:
        return False
