"""FFA-LoRA and RoLoRA: a round trains only one factor, so the mean is that of the updates."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray
from safetensors.torch import load

from espalier.messages.records import read
from tests.bench import Bench
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.promises.secure_sum_promises import SECURE
from tests.methods.tuning.adapters_sent import PATHS, bodies, num_data_bytes, written
from tests.methods.tuning.test_fedpetuning_wire_dtypes import brought, first_adapters

FEW_STEPS: dict[str, Any] = {
    "federation.rounds": 2,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "lora.merge": True,
}
SCALING = 2.0
Tensors = dict[str, dict[str, torch.Tensor]]


def sent_in(grid: InProcessGrid, server_round: int) -> dict[int, Tensors]:
    """Return the tensors that each client sent in a round, by blob key and name."""
    found: dict[int, Tensors] = {}
    for kind in ("train", "fetch"):
        for client, replies in bodies(grid, server_round, kind).items():
            for body in replies:
                tensors = {key: load(blob) for key, blob in body.blobs.items()}
                found.setdefault(client, {}).update(tensors)
    return found


def samples_in(grid: InProcessGrid, server_round: int) -> dict[int, float]:
    """Return the weight of each client: its number of training sequences."""
    replies = bodies(grid, server_round, "train")
    return {client: float(found[0].fields["samples"]) for client, found in replies.items()}


def dense_mean(
    begun: Tensors, sent: dict[int, Tensors], weights: dict[int, float], key: str, matrix: str
) -> NDArray[np.float64]:
    """Return the mean of the clients' dense updates, client by client.

    A factor that a client did not send is that of ``begun``.
    """
    total = np.zeros((1, 1))
    for client, tensors in sent.items():
        own = {**begun[key], **tensors[key]}
        update = own[f"{matrix}.lora_b"].double().numpy() @ own[f"{matrix}.lora_a"].double().numpy()
        total = total + weights[client] * SCALING * update
    return np.asarray(total / sum(weights[client] for client in sent))


def assert_dense_mean(bench: Bench, begun: Tensors, grid: InProcessGrid, last: int) -> None:
    """Assert that the written adapter is the dense mean of the last round's updates."""
    (folder,) = (bench.folder / "runs").iterdir()
    sent = sent_in(grid, last)
    for block in (0, 1):
        for matrix in PATHS:
            b, a = written(folder, block, matrix)
            key = f"block-{block:04d}"
            expected = dense_mean(begun, sent, samples_in(grid, last), key, matrix)
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(SCALING * b @ a, expected, rtol=0, atol=1e-7)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedpetuning", FEW_STEPS)


@pytest.mark.parametrize(
    ("aggregation", "rounds"), [("ffa", 2), ("rolora", 1), ("rolora", 2), ("rolora", 3)]
)
def test_the_mean_is_that_of_the_dense_updates(bench: Bench, aggregation: str, rounds: int) -> None:
    changes = {
        "fedpetuning__aggregation": aggregation,
        "federation__rounds": rounds,
        "part_bytes": 1 << 20,
    }
    grid = bench.grid(**changes)
    requests = list[Message]()
    grid.before_push = requests.append
    bench.run(grid, **changes)
    begun = first_adapters(bench)
    if aggregation == "rolora" and rounds > 1:
        begun = brought(requests, rounds)[0]
    assert_dense_mean(bench, begun, grid, rounds)


@pytest.mark.slow
class TestFfa(Promises):
    """Promises of FFA-LoRA."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = FEW_STEPS | {"fedpetuning.aggregation": "ffa"}
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    def test_only_b_travels(self, plain: Uninterrupted) -> None:
        messages = [*plain.requests, *(reply for _, reply in plain.received)]
        blobs = [blob for message in messages for blob in read(message.content).blobs.values()]
        names = {name for blob in blobs for name in load(blob)}
        assert names == {"attn.q.lora_b", "attn.v.lora_b"}
        assert {num_data_bytes(blob) for blob in blobs} == {4 * 2 * (16 + 8)}

    def test_a_keeps_its_initial_values(self, plain: Uninterrupted) -> None:
        first = first_adapters(plain.bench)
        for block in (0, 1):
            for matrix in PATHS:
                _, a = written(plain.folder, block, matrix)
                begun = first[f"block-{block:04d}"][f"{matrix}.lora_a"]
                np.testing.assert_array_equal(a, begun.double().numpy())


@pytest.mark.slow
class TestRolora(Promises):
    """Promises of RoLoRA."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = FEW_STEPS | {"fedpetuning.aggregation": "rolora"}
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    def test_the_round_decides_which_factor_is_sent(self, plain: Uninterrupted) -> None:
        sent: dict[int, set[str]] = {}
        for _, reply in plain.received:
            body = read(reply.content)
            for blob in body.blobs.values():
                sent.setdefault(body.header.server_round, set()).update(load(blob))
        assert sent == {
            1: {"attn.q.lora_b", "attn.v.lora_b"},
            2: {"attn.q.lora_a", "attn.v.lora_a"},
        }

    def test_a_reply_has_the_bytes_of_one_factor(self, plain: Uninterrupted) -> None:
        """Both matrices have 16 inputs; q has 16 outputs and v 8. Rank 2, float32."""
        sent: dict[int, set[int]] = {}
        for _, reply in plain.received:
            body = read(reply.content)
            for blob in body.blobs.values():
                sent.setdefault(body.header.server_round, set()).add(num_data_bytes(blob))
        assert sent == {1: {4 * 2 * (16 + 8)}, 2: {4 * 2 * (16 + 16)}}


@pytest.mark.parametrize("aggregation", ["ffa", "rolora"])
def test_secret_means_are_those_of_plain_means(
    aggregation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    settings = FEW_STEPS | {
        "fedpetuning.aggregation": aggregation,
        "federation.client-weights": "equal",
        "federation.aggregation-rule": "mean",
    }
    bench = Bench(tmp_path, "fedpetuning", settings, num_clients=3)
    plain = bench.run()
    bench.settings |= SECURE
    secret = bench.run()
    for block in (0, 1):
        for matrix in PATHS:
            for one, other in zip(
                written(plain, block, matrix), written(secret, block, matrix), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("aggregation", ["ffa", "rolora"])
def test_rounded_factors_give_nearly_the_same_update(
    aggregation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = FEW_STEPS | {"fedpetuning.aggregation": aggregation, "federation.rounds": 3}
    bench = Bench(tmp_path, "fedpetuning", settings, num_clients=2)
    exact = bench.run()
    rounded = bench.run(federation__wire_dtype="nf4")
    for matrix in PATHS:
        expected = np.matmul(*written(exact, 1, matrix))
        distance = np.abs(np.matmul(*written(rounded, 1, matrix)) - expected).max()
        assert 0 < distance < 0.2 * np.abs(expected).max()


@pytest.mark.parametrize(
    "aggregation",
    ["ffa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rolora", "fedex"))],
)
def test_private_clients_train_only_what_they_send(
    aggregation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus", reason="needs the extra privacy")
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = FEW_STEPS | {
        "fedpetuning.aggregation": aggregation,
        "federation.client-weights": "equal",
        "privacy.epsilon": 4.0,
        "privacy.noise": "seed",
        "privacy.sampling-rate": 0.3,
    }
    bench = Bench(tmp_path, "fedpetuning", settings, num_clients=2)
    grid = bench.grid()
    folder = bench.run(grid)
    first = first_adapters(bench)
    sent = [sent_in(grid, number)[0]["block-0000"] for number in (1, 2)]
    for matrix in PATHS:
        begun = first["block-0000"][f"{matrix}.lora_a"].double().numpy()
        b, a = written(folder, 0, matrix)
        assert np.abs(b).max() > 0
        assert (np.abs(a[:2] - begun).max() == 0) == (aggregation == "ffa")
    ends = {name.rpartition("_")[2] for tensors in sent for name in tensors}
    assert ends == ({"b"} if aggregation == "ffa" else {"a", "b"})
