"""FedEx-LoRA: the mean of the factors, and the residual of the updates folded into the base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load

from espalier.errors import EspalierError
from espalier.messages.records import read
from tests.bench import Bench, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.tuning.adapters_sent import PATHS, num_data_bytes, sent_adapters, written
from tests.methods.tuning.test_exact_factors import FEW_STEPS, SCALING, samples_in

SIDES = 16 + 16 + 16 + 8
FEDEX: dict[str, Any] = FEW_STEPS | {"fedpetuning.aggregation": "fedex"}


def update(tensors: Mapping[str, torch.Tensor], matrix: str, kind: str) -> NDArray[np.float64]:
    """Return the dense product of two factors."""
    b = tensors[f"{matrix}.{kind}_b"].double().numpy()
    return np.asarray(SCALING * b @ tensors[f"{matrix}.{kind}_a"].double().numpy())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedpetuning", FEDEX)


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_result_is_the_dense_mean(bench: Bench, rounds: int) -> None:
    """What was folded in before a round is added to the clients' updates of the round.

    After four rounds the folded update has the full rank of the smaller matrix.
    """
    changes = {"federation__rounds": rounds, "part_bytes": 1 << 20}
    grid = bench.grid(**changes)
    folded: dict[str, Mapping[str, torch.Tensor]] = {}

    def look(message: Any) -> None:
        body = read(message.content)
        if body.header.kind == "train" and body.header.server_round == rounds:
            folded.update({key: load(blob) for key, blob in body.blobs.items()})

    grid.before_push = look
    folder = bench.run(grid, **changes)
    sent = sent_adapters(grid, rounds)
    weights = samples_in(grid, rounds)
    for block in (0, 1):
        key = f"block-{block:04d}"
        for matrix in PATHS:
            total: Any = 0.0
            for client, tensors in sent.items():
                total = total + weights[client] * update(tensors[key], matrix, "lora")
            expected = total / sum(weights.values())
            if rounds > 1:
                expected = expected + update(folded[key], matrix, "folded")
            b, a = written(folder, block, matrix)
            assert np.abs(expected).max() > 1e-4
            np.testing.assert_allclose(SCALING * b @ a, expected, rtol=0, atol=1e-6)


def test_the_mean_of_the_factors_is_another_update(bench: Bench) -> None:
    changes = {"federation__rounds": 1}
    exact = np.matmul(*written(bench.run(**changes), 0, "attn.q"))
    factors = bench.run(fedpetuning__aggregation="factors", **changes)
    assert np.abs(np.matmul(*written(factors, 0, "attn.q")) - exact).max() > 1e-6


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("federation__wire_dtype", "bfloat16", "set it to 'float32'"),
        ("lora__keep_zeros", True, "would fill its zeros"),
        ("federation__aggregation_rule", "median", "set the rule to 'clipped-mean'"),
        ("federation__secure_sum", True, "set it to 'factors', 'ffa' or 'rolora'"),
        ("training__compile", True, "training.compile = true"),
    ],
)
def test_settings_that_break_exactness_are_refused(
    bench: Bench, key: str, value: Any, words: str
) -> None:
    with pytest.raises(EspalierError, match=words):
        bench.run(**{key: value})


@pytest.mark.slow
class TestFedEx(Promises):
    """Promises of FedEx-LoRA."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = FEDEX
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    def test_bytes_are_those_of_the_documentation(self, plain: Uninterrupted) -> None:
        """Up: the adapters. Down: these, and a rank of three clients per finished round."""
        up = [read(reply.content) for _, reply in plain.received]
        down = [read(request.content) for request in plain.requests]
        for bodies, rank in ((up, 2), (down, 2 + 3 * 2)):
            sizes = {
                num_data_bytes(blob)
                for body in bodies
                if body.header.server_round == 2
                for blob in body.blobs.values()
            }
            assert sizes == {4 * rank * SIDES}

    def test_a_missing_client_leaves_zeros(self, without_client_2: Uninterrupted) -> None:
        b, _ = written(without_client_2.folder, 0, "attn.q")
        assert b.shape == (16, 2 + 2 * 3 * 2)
        assert int((np.abs(b).max(axis=0) > 0).sum()) == 2 + 2 * 2 * 2

    def test_report_names_the_rank_of_the_result(self, plain: Uninterrupted) -> None:
        assert summary(plain.folder)["report"]["ranks"] == [14]
