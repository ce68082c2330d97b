"""Clients that claim too much: limits of their weights, and the reports about them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.records import read, write
from tests.bench import Bench, summary
from tests.methods.tuning.adapters_sent import norm_weights, padded_mean, sent_adapters, written

TUNING = {
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def claiming(**fields: Any) -> Any:
    """Return a tamper that changes fields of a client's report."""

    def spoil(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != "train":
            return reply
        body.fields |= fields
        return Message(write(body), reply_to=request)

    return spoil


def test_sample_claim_is_capped_by_median(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(folder, "fedpetuning", TUNING | {"federation.rounds": 1, "lora.rank": 2})
    grid = bench.grid()
    grid.tamper[1] = claiming(samples=10**9)
    made = bench.run(grid)
    clients = summary(made)["clients"]
    samples = {client["client"]: float(client["metrics"]["samples"]) for client in clients}
    assert samples[1] == 1e9
    second = sorted(samples.values())[1]
    weights = samples | {1: 2 * second}
    for found, mean in zip(
        written(made, 0, "attn.q"),
        padded_mean(sent_adapters(grid, 1), weights, 0, "attn.q", 2),
        strict=True,
    ):
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-9)
    note = {"weight": {"claimed": 1e9, "counted": 2 * second, "times": 1}}
    assert [client["capped"] for client in clients] == [{}, note, {}, {}]
    shown = capsys.readouterr().out
    assert f"node-00001: its weight 1e+09 was limited to {2 * second:g}; if the number" in shown
    assert "a larger federation.max-weight-ratio" in shown


def test_norm_and_capability_claims_are_capped(
    folder: Path,
) -> None:
    more = {
        "federation.rounds": 1,
        "hetlora.gamma": 1.0,
        "federation.max-weight-ratio": 1.0,
        "lora.rank": 8,
    }
    bench = Bench(folder, "hetlora", TUNING | more)
    grid = bench.grid()
    (greedy,) = [
        context for context in grid.contexts.values() if context.node_config["partition-id"] == 3
    ]
    greedy.node_config["capability"] = 1e9
    made = bench.run(grid)
    clients = summary(made)["clients"]
    assert [client["metrics"]["lora_rank"] for client in clients] == [2, 2, 2, 8]
    assert clients[3]["capped"]["capability"] == {"claimed": 1e9, "counted": 4.0}
    sent = sent_adapters(grid, 1)
    norms = norm_weights(sent)
    # At ratio 1 a weight exceeds neither the median nor the mean, so all clients weigh the same.
    weights = dict.fromkeys(norms, 1.0)
    assert sum("weight" in client["capped"] for client in clients) == 3
    for found, mean in zip(
        written(made, 1, "attn.v"), padded_mean(sent, weights, 1, "attn.v", 8), strict=True
    ):
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-8)


def test_claims_of_fedspallm_are_cut_too(folder: Path) -> None:
    settings = {"federation.client-weights": "samples"}
    bench = Bench(folder, "fedspallm", settings | {"fedspallm.local-method": "magnitude"})
    grid = bench.grid()
    for context in grid.contexts.values():
        if context.node_config["partition-id"] == 2:
            context.node_config["capability"] = 1e9
    grid.tamper[2] = claiming(calibration_samples=10**6)
    clients = summary(bench.run(grid))["clients"]
    assert clients[2]["capped"] == {
        "capability": {"claimed": 1e9, "counted": 4.0},
        "weight": {"claimed": 1e6, "counted": 4.0, "times": 1},
    }
