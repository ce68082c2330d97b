"""Fixtures of the tests of sites."""

from pathlib import Path

import pytest

from tests.bench import EVALUATED, Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", EVALUATED | {"evaluation.own-text": False}, num_clients=2)
