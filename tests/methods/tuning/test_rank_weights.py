"""HetLoRA with ranks averaged over their holders (raFLoRA), and the energy of ranks."""

from typing import Any

import numpy as np
import pytest

from tests.bench import Bench, summary
from tests.methods.tuning.adapters_sent import PATHS, factors, norm_weights, sent_adapters, written

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


def test_each_rank_is_averaged_over_its_holders(bench: Bench) -> None:
    grid = bench.grid()
    folder = bench.run(grid)
    sent = sent_adapters(grid, 1)
    weights = norm_weights(sent)
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
