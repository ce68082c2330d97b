"""Recognition of a process that plays a node of a simulation.

A simulated node has nothing of its own: the run's settings say what it holds, and no limit of a site applies. So a real one
must not be taken for it. Flower's simulation runs every ClientApp in an actor of Ray; a SuperNode starts ``flwr-clientapp``, in
which nobody starts Ray.
Covers: what the process is, whatever the run's settings and the node's configuration say (``partition-id`` among them); where
it cannot be known, the node counts as real.
Does not cover: a program that starts Ray itself, or that says otherwise. The program is what the run's submitter sends.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from espalier.flower.outside_task import play_task
from espalier.flower.shared_nodes import taken_out

_PLAYED: ContextVar[bool] = ContextVar("played", default=False)


def in_simulation() -> bool:
    """Whether this process is an actor of Ray, or plays a node itself."""
    return _PLAYED.get() or _is_ray_actor()


def as_played(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: let a simulated node answer as the client that the message says it plays; a real one is what it is."""
    if in_simulation() and message.has_content() and (played := taken_out(message.content)):
        config = {**context.node_config, **played}
        context = Context(
            context.run_id, context.node_id, config, context.state, context.run_config
        )
    return call_next(message, context)


@contextmanager
def playing_a_node() -> Iterator[None]:
    """For programs that call the ClientApp themselves, as tests and measurements do: what happens within is simulated."""
    play_task()
    token = _PLAYED.set(True)
    try:
        yield
    finally:
        _PLAYED.reset(token)


def _is_ray_actor() -> bool:
    """Nothing is imported to find out: in an actor, Ray is there."""
    ray = sys.modules.get("ray")
    try:
        return (
            ray is not None
            and ray.is_initialized()
            and ray.get_runtime_context().get_actor_id() is not None
        )
    except Exception:  # whatever Ray says, it does not say that this is an actor
        return False
