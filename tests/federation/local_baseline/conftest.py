"""Fixtures of the tests of local baselines."""

from pathlib import Path

import pytest

from tests.bench import LOCAL_ONLY, Bench
from tests.federation.local_baseline.baseline_runs import METHODS


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    method = getattr(request, "param", "fedpetuning")
    return Bench(tmp_path, method, METHODS.get(method, {}) | LOCAL_ONLY, num_clients=2)
