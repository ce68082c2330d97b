"""Secure sums of all methods that have them: promises, and results like those of plain sums."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.records import read
from espalier.messages.tensor_blobs import unpack_tensors, views
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
from tests.methods.promises.contracts import outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.secure_sum_promises import (
    SECURE,
    STEPS,
    UNMASKING,
    SecureSumPromises,
    pieces,
    silent_from,
)

BY_SAMPLES = TUNED | {"federation.aggregation-rule": "mean"}


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
class TestVotes(SecureSumPromises):
    method = "fedprllm"
    settings: ClassVar[dict[str, Any]] = {"pruning.sparsity": 0.5}
    last_round = 1

    def test_no_tensor_of_a_client_reaches_the_server(self, secure: Bench) -> None:
        """Only replies are searched: the result has stretches of masks that clients share."""
        grid = secure.grid()
        stored = set[bytes]()

        def look(_: Message) -> None:
            files = (secure.folder / "state").glob("*/*/r*/*")
            stored.update(file.read_bytes() for file in files if file.suffix != ".json")

        grid.before_push = look
        secure.run(grid)
        haystack = b"\x00\x01\x02".join(outgoing_bytes(reply) for _, reply in grid.received)
        searched = 0
        for blob in stored:
            for values in views(blob).values():
                for piece in pieces(values.tobytes()):
                    assert piece not in haystack
                    searched += 1
        assert searched >= 100


@pytest.mark.slow
class TestAdapters(SecureSumPromises):
    """Means are rounded in another way than those of plain replies, so bytes may differ."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = BY_SAMPLES | {"federation.rounds": 1}
    last_round = 1
    result_round = 2

    def test_results_equal_those_of_plain_sums(
        self, plain: Uninterrupted, secret: Uninterrupted
    ) -> None:
        assert summary(secret.folder)["report"] == summary(plain.folder)["report"]
        values = [
            summary(run.folder)["metrics"][0]["values"]["federated"] for run in (plain, secret)
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-4)

    @pytest.fixture(scope="class")
    @classmethod
    def secret_without(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
        """Execute a run with secure sums whose third client is silent after enrolment."""
        return cls._uninterrupted(tmp_path_factory.mktemp("without"), home, SECURE, silent=2)

    @pytest.mark.parametrize("step", STEPS)
    def test_a_client_may_drop_out_at_each_step(  # type: ignore[override]
        self,
        secure: Bench,
        secret: Uninterrupted,
        secret_without: Uninterrupted,
        step: str,
    ) -> None:
        """A client counts if its masked summands are complete."""
        grid = secure.grid()
        grid.tamper[2] = silent_from(step)
        folder = secure.run(grid)
        clients = summary(folder)["clients"]
        assert [client["status"] == "completed" for client in clients] == [True, True, False, True]
        expected = secret if step in UNMASKING else secret_without
        assert model_files(folder) == model_files(expected.folder)
