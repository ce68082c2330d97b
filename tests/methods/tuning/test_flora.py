"""FLoRA: adapters of different ranks are stacked to the exact mean of the updates."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from espalier.errors import EspalierError
from espalier.messages.records import read
from tests.bench import Bench, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.tuning.adapters_sent import PATHS, num_data_bytes, sent_adapters, written
from tests.methods.tuning.test_exact_factors import SCALING, samples_in
from tests.methods.tuning.test_fedex import SIDES, update

SETTINGS: dict[str, Any] = {
    "federation.rounds": 2,
    "lora.ranks": "1,2,4",
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "lora.merge": True,
}
SUM_OF_RANKS = 1 + 2 + 4 + 4


@pytest.mark.slow
class TestFlora(Promises):
    """Promises of FLoRA."""

    method = "flora"
    settings: ClassVar[dict[str, Any]] = SETTINGS
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    def test_bytes_are_those_of_the_documentation(self, plain: Uninterrupted) -> None:
        """Up: a client's own rank. Down: all ranks of every finished round, at most the side."""
        received = [read(reply.content) for _, reply in plain.received]
        for body in received:
            rank = (1, 2, 4, 4)[body.header.client]
            for blob in body.blobs.values():
                assert num_data_bytes(blob) == 4 * rank * SIDES
        down = [read(request.content) for request in plain.requests]
        sizes = {num_data_bytes(blob) for body in down for blob in body.blobs.values()}
        assert sizes == {4 * (SUM_OF_RANKS * 32 + 8 * 24)}


@pytest.fixture
def flora(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "flora", SETTINGS)


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_result_is_the_sum_of_the_dense_means(flora: Bench, rounds: int) -> None:
    """After three rounds the sum has the full rank of the matrices."""
    grid = flora.grid(federation__rounds=rounds)
    folder = flora.run(grid, federation__rounds=rounds)
    for block in (0, 1):
        key = f"block-{block:04d}"
        for matrix in PATHS:
            expected: Any = 0.0
            for server_round in range(1, rounds + 1):
                sent = sent_adapters(grid, server_round)
                weights = samples_in(grid, server_round)
                for client, tensors in sent.items():
                    part = weights[client] / sum(weights.values())
                    expected = expected + part * update(tensors[key], matrix, "lora")
            b, a = written(folder, block, matrix)
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(SCALING * b @ a, expected, rtol=0, atol=1e-6)
    assert summary(folder)["report"]["ranks"] == [SUM_OF_RANKS if rounds == 1 else 16]


def test_every_round_begins_with_other_adapters(flora: Bench) -> None:
    """With a learning rate of almost nothing clients send the adapters with which they began."""
    changes = {"training__learning_rate": 1e-300, "federation__client_weights": "equal"}
    grid = flora.grid(**changes)
    flora.run(grid, **changes)
    first, second = (sent_adapters(grid, number)[3]["block-0000"] for number in (1, 2))
    assert not first["attn.q.lora_b"].any()
    assert not second["attn.q.lora_b"].any()
    assert not torch.equal(first["attn.q.lora_a"], second["attn.q.lora_a"])
    # A client of a lower rank begins with the first rows of the others.
    small = sent_adapters(grid, 2)[1]["block-0000"]["attn.q.lora_a"]
    torch.testing.assert_close(small, second["attn.q.lora_a"][:2])


def test_secure_sums_are_refused_with_the_reason(flora: Bench) -> None:
    with pytest.raises(EspalierError, match="do not follow from their sum"):
        flora.run(federation__secure_sum=True)
