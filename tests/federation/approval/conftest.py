"""Fixtures of the tests of approval."""

from pathlib import Path

import pytest

from client_app.policy import approval as hold
from tests.bench import Bench
from tests.federation.approval.approving_sites import SECONDS, Time


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Install a clock whose approver decides nothing, unless a test replaces it."""
    found = Time(lambda: None)
    monkeypatch.setattr(hold, "clock", lambda: found.seconds)
    monkeypatch.setattr(hold, "pause", found.pause)
    return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment."""
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    return Bench(tmp_path, "fedprllm", {"deadline-seconds": SECONDS}, num_clients=2)
