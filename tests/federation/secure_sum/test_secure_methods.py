"""Secure sums of all methods that have them: promises, and results like those of plain sums."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from espalier.messages.records import read
from espalier.messages.tensor_blobs import unpack_tensors
from tests.bench import Bench, Home, home, model_files, summary
from tests.federation.secure_sum.test_summands import (
    EXACT,
    MEAN,
    SFT_P,
    SODA,
    SPA,
    TUNED,
    save_deep,
)
from tests.methods.promises.hidden_tensors import HiddenTensors
from tests.methods.promises.secure_sum_promises import (
    SECURE,
    RoundedSumPromises,
    SecureSumPromises,
)

BY_SAMPLES = TUNED | {
    "federation.aggregation-rule": "mean",
    "federation.client-weights": "samples",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return save_deep(tmp_path_factory.mktemp("deep"))


def bench_of(tmp_path: Path, shared: Home, method: str, settings: dict[str, Any]) -> Bench:
    return Bench(tmp_path, method, settings | SECURE, num_clients=3, home=shared)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "fedprllm iterative" else pytest.param(name, marks=pytest.mark.slow)
        for name in EXACT
    ],
)
def test_secret_results_are_those_of_plain_sums(
    name: str, shared: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = bench_of(tmp_path, shared, name.split()[0], EXACT[name])
    secret = bench.run()
    assert model_files(secret) == model_files(bench.run(federation__secure_sum=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slicegpt", "sft-p", "fedsoda", "fedspallm"])
def test_rounded_results_are_nearly_those_of_plain_sums(
    name: str, shared: Home, deep: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = {
        "slicegpt": {"slicegpt.multiple": 4, **MEAN},
        "sft-p": TUNED | SFT_P,
        "fedsoda": TUNED | SODA | MEAN | {"public.text": str(deep.public.parent / "align.txt")},
        "fedspallm": SPA,
    }[name]
    bench = bench_of(tmp_path, deep if name == "fedsoda" else shared, name, settings)
    secret, plain = (summary(bench.run(federation__secure_sum=on)) for on in (True, False))
    assert len(secret["metrics"]) == len(plain["metrics"])
    for one, other in zip(secret["metrics"], plain["metrics"], strict=True):
        known = {key: value for key, value in other["values"].items() if value is not None}
        assert {key: one["values"][key] for key in known} == pytest.approx(known, rel=1e-3)


def test_no_report_tells_the_weight_of_a_client(
    shared: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is weighted by samples all the same: it is that of the plain run."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    bench = bench_of(tmp_path, shared, "fedpetuning", BY_SAMPLES)
    # Clients with less text have fewer sequences.
    text = (tmp_path / "text-1.txt").read_text()
    (tmp_path / "text-1.txt").write_text("\n\n".join(text.split("\n\n")[:20]))
    grid = bench.grid()
    secret = bench.run(grid)
    reports = [read(reply.content).fields for _, reply in grid.received]
    told = [fields["samples"] for fields in reports if "samples" in fields]
    assert told == [0] * 6
    assert all("samples" not in own["metrics"] for own in summary(secret)["clients"])
    plain = bench.run(federation__secure_sum=False)
    weights = [own["metrics"]["samples"] for own in summary(plain)["clients"]]
    assert len(set(weights)) > 1
    tensors = [
        unpack_tensors((folder / "adapter" / "adapter_model.safetensors").read_bytes())
        for folder in (plain, secret)
    ]
    for name, values in tensors[0].items():
        np.testing.assert_allclose(tensors[1][name], values, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
class TestVotes(HiddenTensors, SecureSumPromises):
    method = "fedprllm"
    settings: ClassVar[dict[str, Any]] = {"pruning.sparsity": 0.5}
    last_round = 1

    def allowed(self, bench: Bench, folder: Path) -> bytes:
        """Return the bytes of the result: it has stretches of masks that clients share."""
        return b"".join(model_files(folder).values())


@pytest.mark.slow
class TestAdapters(HiddenTensors, RoundedSumPromises):
    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = BY_SAMPLES | {"federation.rounds": 1}
    last_round = 1
    result_round = 2
