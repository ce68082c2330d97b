"""Runs with local baselines."""

from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from tests.bench import Bench
from tests.in_process import InProcessGrid

TUNING = {
    "federation.rounds": 1,
    "training.steps": 2,
    "training.batch-size": 2,
    "lora.rank": 2,
    "part-bytes": 1 << 20,
}
METHODS: dict[str, dict[str, Any]] = {
    "fedpetuning": TUNING,
    "fedprllm": {"pruning.strategy": "iterative"},
    "pooled-pruning": {"pruning.strategy": "iterative"},
    "hetlora": (
        {key.replace("fedpetuning", "hetlora"): value for key, value in TUNING.items()}
        | {"lora.ranks": "1,2"}
    ),
}
"""Methods whose rounds leave no local baseline."""
every_method = pytest.mark.parametrize("bench", sorted(METHODS), indirect=True)


def requests_of(bench: Bench) -> dict[str, MessageBody]:
    """Return the first request of each kind to the first client.

    The requests come from a run whose private state is gone.
    """
    found: dict[str, MessageBody] = {}
    grid = bench.grid()

    def note(message: Message) -> None:
        body = read(message.content)
        if body.header.client == 0:
            found.setdefault(body.header.kind, body)

    grid.before_push = note
    bench.run(grid)
    return found


def answer(
    bench: Bench, request: MessageBody, attempt: int = 1, grid: InProcessGrid | None = None
) -> MessageBody:
    """Return the first client's reply."""
    grid = grid or bench.grid()
    node, context = next(iter(grid.contexts.items()))
    again = MessageBody(
        request.header.model_copy(update={"attempt": attempt}),
        dict(request.fields),
        dict(request.blobs),
    )
    return read(grid.answer(address(again, node, 60.0), context).content)
