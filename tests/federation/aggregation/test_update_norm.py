"""Limit of a client's own change (``federation.max-update-norm``), as the server receives it."""

import math

import pytest
import torch
from safetensors.torch import load

from espalier.messages.records import read
from tests.bench import Bench, summary
from tests.federation.secure_sum.summed_methods import (
    FedSbSums,
    FedSodaSums,
    FfaSums,
    SftPSums,
)
from tests.in_process import InProcessGrid

Sent = dict[tuple[int, str, str], torch.Tensor]
"""Tensors that a client sends, by client, blob and name."""


def sent(grid: InProcessGrid) -> Sent:
    return {
        (body.header.client, key, name): tensor.double()
        for body in (read(message.content) for _, message in grid.received)
        if body.header.kind in ("train", "fetch")
        for key, blob in body.blobs.items()
        for name, tensor in load(blob).items()
    }


def norm(one: Sent, other: Sent, client: int) -> float:
    squares = (
        float((value - other[place]).square().sum())
        for place, value in one.items()
        if place[0] == client
    )
    return math.sqrt(sum(squares))


class LimitedUpdates:
    """The change keeps its direction, so two limits differ by the difference of the changes."""

    def test_replies_are_within_the_norm(self, bench: Bench) -> None:
        bench.settings = bench.settings | {"federation.aggregation-rule": "mean"}

        def run(limit: float) -> Sent:
            grid = bench.grid(federation__max_update_norm=limit)
            folder = bench.run(grid, federation__max_update_norm=limit)
            assert summary(folder)["status"] == "completed"
            return sent(grid)

        free, large, small, smaller = (run(limit) for limit in (0.0, 1e6, 3e-2, 1e-2))
        assert all(torch.equal(tensor, large[place]) for place, tensor in free.items())
        for client in range(bench.num_clients):
            assert norm(small, smaller, client) == pytest.approx(2e-2, rel=1e-3)
            # From no limit to one of 0.03 is the rest of the same way.
            whole = norm(free, smaller, client)
            assert norm(free, small, client) == pytest.approx(whole - 2e-2, rel=1e-3)


class TestFfaLora(LimitedUpdates, FfaSums): ...


class TestFedSb(LimitedUpdates, FedSbSums): ...


class TestFedSoda(LimitedUpdates, FedSodaSums): ...


class TestSftP(LimitedUpdates, SftPSums): ...
