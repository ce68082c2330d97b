"""Fixtures of the tests of tasks."""

from pathlib import Path

import pytest

from tests.bench import Bench
from tests.federation.tasks.task_runs import bench_of, reviews
from tests.tiny_model import save_tiny_roberta


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    for name in ("client_text", "client_items"):
        monkeypatch.setattr(f"espalier.data.{name}.MIN_PREDICTIONS", 3)
    monkeypatch.setattr("espalier.data.client_items.MIN_ITEMS", 3)
    return tmp_path


@pytest.fixture
def encoder(folder: Path) -> Bench:
    bench = bench_of(folder, "sst2", reviews)
    bench.model = save_tiny_roberta(folder / "encoder")
    return bench
