"""Simulations with fewer nodes than clients."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

import client_app.app
import server_app.app
from client_app.simulation import as_played
from espalier.flower.shared_nodes import PLAYED, SharedNodes, with_enough_nodes
from tests.bench import Bench, home, summary
from tests.in_process import InProcessGrid


def simulated(nodes: int) -> Grid:
    """Return a grid of this class without a simulation behind it."""
    return Mock(spec=InMemoryGrid, get_node_ids=lambda: list(range(50, 50 + nodes)))


def test_only_small_simulations_share_nodes() -> None:
    assert isinstance(with_enough_nodes(simulated(2), 3), SharedNodes)
    for grid in (simulated(3), simulated(4), Mock(spec=Grid, get_node_ids=lambda: [1])):
        assert with_enough_nodes(grid, 3) is grid


def test_two_nodes_for_five_clients_equal_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = home(tmp_path)
    found = []
    for name, nodes in (("own", 5), ("shared", 2)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
        texts = {"data.source": "files", "data.path": f"{folder}/text-{{client}}.txt"}
        bench = Bench(folder, "fedprllm", texts, num_clients=5, home=shared)
        configs = [{"partition-id": node, "num-partitions": nodes} for node in range(nodes)]
        grid = InProcessGrid(client_app.app.app, configs, bench.config())
        if nodes < 5:
            monkeypatch.setattr(server_app.app, "with_enough_nodes", SharedNodes)
        run = bench.run(grid)
        found.append(
            (
                (run / "masks.safetensors").read_bytes(),
                [client["site"] for client in summary(run)["clients"]],
            )
        )
    assert found[0] == found[1]
    assert found[0][1] == [f"node-{client:05d}" for client in range(5)]


def test_a_real_node_plays_nobody_else() -> None:
    """The record stays in the message, which is then refused because of it."""
    content = RecordDict({PLAYED: ConfigRecord({"partition-id": 4, "num-partitions": 5})})
    context = Context(1, 2, {"site": "hospital-a"}, RecordDict(), {})
    seen: list[tuple[Message, Context]] = []

    def answer(message: Message, context: Context) -> Message:
        seen.append((message, context))
        return message

    as_played(Message(content, dst_node_id=2, message_type="train"), context, answer)
    ((message, given),) = seen
    assert PLAYED in message.content
    assert given is context
