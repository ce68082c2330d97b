"""HetLoRA with ranks averaged over their holders (raFLoRA), and the energy of ranks."""

from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.records import read
from tests.bench import Bench, private_text, results, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.promises import Promises
from tests.methods.tuning.adapters_sent import (
    PATHS,
    bodies,
    factors,
    norm_weights,
    num_data_bytes,
    sent_adapters,
    written,
)
from tests.methods.tuning.hetlora_runs import SIDES, HetLoRARuns

SETTINGS: dict[str, Any] = {
    "federation.rounds": 1,
    "lora.ranks": "2,4,8",
    "hetlora.gamma": 1.0,
    "hetlora.rank-weights": "holders",
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 8,
    "lora.alpha": 16.0,
}


@pytest.fixture
def bench(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "hetlora", SETTINGS)


@pytest.mark.parametrize("by", ["samples", "norms"])
def test_each_rank_is_averaged_over_its_holders(bench: Bench, by: str) -> None:
    """Clients count by samples by default, as in the paper, or by the norms of their updates."""
    for client in range(bench.num_clients):
        passages = private_text(client).split("\n\n")[: 60 - 12 * client]
        (bench.folder / f"text-{client}.txt").write_text("\n\n".join(passages))
    unlimited: dict[str, Any] = {"federation__max_weight_ratio": 1e6}
    unlimited |= {"federation__client_weights": by} if by == "norms" else {}
    grid = bench.grid(**unlimited)
    folder = bench.run(grid, **unlimited)
    sent = sent_adapters(grid, 1)
    clients = summary(folder)["clients"]
    weights = (
        norm_weights(sent)
        if by == "norms"
        else {client["client"]: client["metrics"]["samples"] for client in clients}
    )
    assert len(set(weights.values())) > 2
    for matrix in PATHS:
        b, a = written(folder, 0, matrix)
        pairs = {client: factors(sent, client, 0, matrix) for client in sent}
        for rank in range(8):
            held = [client for client, (own, _) in pairs.items() if own.shape[1] > rank]
            total = sum(weights[client] for client in held)
            column = sum(weights[client] * pairs[client][0][:, rank] for client in held) / total
            row = sum(weights[client] * pairs[client][1][rank] for client in held) / total
            np.testing.assert_allclose(b[:, rank], column, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(a[rank], row, rtol=1e-5, atol=1e-8)


def test_mean_of_updates_has_each_rank_of_its_holders(bench: Bench) -> None:
    """The paper's form: rank p of the dense mean is the sum of ``w_ip b_ip a_ip`` over holders.

    The result is its best approximation of rank 8; the clients' ranks add up to more.
    """
    changes: dict[str, Any] = {
        "federation__max_weight_ratio": 1e6,
        "federation__client_weights": "norms",
        "hetlora__aggregation": "svd",
    }
    grid = bench.grid(**changes)
    folder = bench.run(grid, **changes)
    sent = sent_adapters(grid, 1)
    weights = norm_weights(sent)
    for matrix in PATHS:
        pairs = {client: factors(sent, client, 0, matrix) for client in sent}
        dense: Any = 0.0
        for rank in range(8):
            held = [client for client, (own, _) in pairs.items() if own.shape[1] > rank]
            total = sum(weights[client] for client in held)
            for client in held:
                own_b, own_a = (np.asarray(own, np.float64) for own in pairs[client])
                dense += weights[client] / total * np.outer(own_b[:, rank], own_a[rank])
        u, values, vh = np.linalg.svd(dense)
        # Only attn.q has more than 8 rows, so only its mean has to be approximated.
        assert matrix != "attn.q" or values[8] > 1e-3 * values[0]
        best = u[:, :8] * values[:8] @ vh[:8]
        found = np.matmul(*written(folder, 0, matrix))
        np.testing.assert_allclose(found, best, rtol=0, atol=1e-6 * values[0])


def test_no_holder_has_more_weight_than_in_the_mean_of_all(bench: Bench) -> None:
    """Of four clients with a ratio of 2 none has more than half; the last B, 0, has the rest."""
    changes = {"lora__ranks": "2,4,4,8"}
    limited = bench.run(**changes)
    free = bench.run(**changes, federation__max_weight_ratio=1e6)
    for matrix in PATHS:
        (b, _), (free_b, _) = (written(folder, 0, matrix) for folder in (limited, free))
        np.testing.assert_allclose(b[:, 4:], free_b[:, 4:] / 2, rtol=1e-5, atol=1e-9)
        assert np.abs(free_b[:, 4:]).max() > 0


def test_high_ranks_keep_more_energy_among_their_holders(bench: Bench) -> None:
    """The energy of a rank is a fraction of the update's, from the files of the adapter."""
    shares = {}
    for among in ("all", "holders"):
        folder = bench.run(hetlora__rank_weights=among, federation__rounds=2)
        report = summary(folder)["report"]["rank_energy"]
        energy = np.zeros(8)
        for block in (0, 1):
            for matrix in PATHS:
                product = np.matmul(*written(folder, block, matrix))
                energy += (np.linalg.svd(product)[1] ** 2)[:8]
        assert len(report) == 2
        np.testing.assert_allclose(report[-1], energy / energy.sum(), rtol=1e-3, atol=1e-9)
        shares[among] = sum(report[-1][4:])
    assert shares["holders"] > shares["all"]


def silent_after_round_1(request: Message, reply: Message) -> Message | None:
    """Drop the replies of a client from round 2 on (a tamper of ``InProcessGrid``)."""
    return reply if read(request.content).header.server_round < 2 else None


def test_ranks_that_no_client_holds_stay_also_after_a_resumption(bench: Bench) -> None:
    """Clients 2 and 3, which alone have more than 4 ranks, are silent in round 2."""
    changes = {"federation__rounds": 2, "quorum": 0.5}
    once = bench.run(federation__rounds=1, quorum=0.5)

    def grid() -> InProcessGrid:
        sites = bench.grid(**changes)
        sites.tamper = dict.fromkeys((2, 3), silent_after_round_1)
        return sites

    folder = bench.run(grid(), **changes)
    for matrix in PATHS:
        (b, a), (first_b, first_a) = (written(run, 0, matrix) for run in (folder, once))
        np.testing.assert_array_equal(b[:, 4:], first_b[:, 4:])
        np.testing.assert_array_equal(a[4:], first_a[4:])
        assert np.abs(b[:, :4] - first_b[:, :4]).max() > 1e-6
    killed = bench.killed(
        lambda header: (header.kind, header.server_round, header.client) == ("train", 2, 1),
        grid(),
        **changes,
    )
    resumed = bench.run(grid(), resume_from=str(killed), **changes)
    assert results(resumed) == results(folder)


@pytest.mark.slow
class TestRaFlora(HetLoRARuns, Promises):
    """Promises of raFLoRA."""

    settings: ClassVar[dict[str, Any]] = HetLoRARuns.settings | {
        "hetlora.rank-weights": "holders",
    }

    def test_a_reply_has_the_bytes_of_the_client_s_rank(self, bench: Bench) -> None:
        changes = {"hetlora__gamma": 1.0}
        grid = bench.grid(**changes)
        bench.run(grid, **changes)
        for server_round in (1, 2):
            found = {
                client: [num_data_bytes(blob) for body in replies for blob in body.blobs.values()]
                for client, replies in bodies(grid, server_round, "train").items()
            }
            for client, rank in enumerate((2, 4, 8, 8)):
                assert found[client] == [4 * rank * SIDES] * len(found[client])


@pytest.mark.slow
class TestRaFloraSvd(HetLoRARuns, Promises):
    """Promises of raFLoRA with means of updates, as in the paper."""

    settings: ClassVar[dict[str, Any]] = HetLoRARuns.settings | {
        "hetlora.aggregation": "svd",
        "hetlora.rank-weights": "holders",
    }
