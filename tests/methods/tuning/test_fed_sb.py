"""Fed-SB: only the matrix between frozen factors travels, and its mean is that of the updates."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from espalier.errors import EspalierError
from espalier.hf.whole import frozen_bases
from espalier.hf.whole.frozen_bases import singular_vectors
from espalier.messages.records import read
from tests.bench import Bench
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises
from tests.methods.promises.secure_sum_promises import SECURE
from tests.methods.tuning.adapters_sent import PATHS, num_data_bytes, written
from tests.methods.tuning.test_exact_factors import FEW_STEPS, SCALING, samples_in, sent_in

SETTINGS: dict[str, Any] = FEW_STEPS | {"training.learning-rate": 0.1}


@pytest.mark.slow
class TestFedSb(Promises):
    """Promises of Fed-SB."""

    method = "fed-sb"
    settings: ClassVar[dict[str, Any]] = SETTINGS
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    def test_only_square_matrices_travel(self, plain: Uninterrupted) -> None:
        messages = [*plain.requests, *(reply for _, reply in plain.received)]
        blobs = [blob for message in messages for blob in read(message.content).blobs.values()]
        assert {name for blob in blobs for name in load(blob)} == {"attn.q.lora_r", "attn.v.lora_r"}
        assert {num_data_bytes(blob) for blob in blobs} == {2 * 4 * 2 * 2}


@pytest.fixture
def bench(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fed-sb", SETTINGS, num_clients=3)


def test_the_mean_is_that_of_the_dense_updates(bench: Bench) -> None:
    """The frozen factors are the singular vectors that NumPy finds in the files of the model."""
    grid = bench.grid()
    folder = bench.run(grid)
    whole = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    sent = sent_in(grid, 2)
    weights = samples_in(grid, 2)
    for block in (0, 1):
        for matrix, path in PATHS.items():
            weight = whole.get_submodule(f"model.layers.{block}.{path}").weight
            u, _, vh = np.linalg.svd(weight.detach().double().numpy(), full_matrices=False)
            left = u[:, :2]
            signs = np.sign(left[np.abs(left).argmax(axis=0), [0, 1]])
            expected = np.zeros(weight.shape)
            for client, tensors in sent.items():
                inner = tensors[f"block-{block:04d}"][f"{matrix}.lora_r"].double().numpy()
                part = weights[client] / sum(weights.values())
                expected += part * SCALING * (left * signs) @ inner @ (signs[:, None] * vh[:2])
            b, a = written(folder, block, matrix)
            assert np.abs(expected).max() > 0.05
            np.testing.assert_allclose(SCALING * b @ a, expected, rtol=0, atol=2e-5)


def test_a_node_decomposes_each_matrix_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed: list[tuple[int, ...]] = []

    def counted(weight: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decomposed.append(tuple(weight.shape))
        return singular_vectors(weight, *others)

    monkeypatch.setattr(frozen_bases, "singular_vectors", counted)
    folder = bench.run(evaluation__local_baseline=True)
    # Two matrices in each of two blocks: by the server, and by the node of all simulated clients.
    assert len(decomposed) == 2 * 4
    first = written(folder, 0, "attn.q")
    again = bench.run(evaluation__local_baseline=True)
    np.testing.assert_array_equal(written(again, 0, "attn.q")[0], first[0])


def test_random_bases_are_orthonormal_and_frozen(bench: Bench) -> None:
    changes = {"fed_sb__frozen_bases": "seed"}
    found = [
        written(bench.run(federation__rounds=rounds, **changes), 0, "attn.q")[1]
        for rounds in (1, 2)
    ]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0] @ found[0].T, np.eye(2), atol=1e-6)


def test_secret_means_are_those_of_plain_means(bench: Bench) -> None:
    bench.settings |= {
        "federation.client-weights": "equal",
        "federation.aggregation-rule": "mean",
    }
    plain = bench.run()
    bench.settings |= SECURE
    secret = bench.run()
    for matrix in PATHS:
        products = [np.matmul(*written(folder, 1, matrix)) for folder in (plain, secret)]
        np.testing.assert_allclose(*products, rtol=0, atol=1e-7)


def test_zeros_of_a_pruned_base_are_refused(bench: Bench) -> None:
    with pytest.raises(EspalierError, match="fed-sb cannot mask the update"):
        bench.run(lora__keep_zeros=True)
