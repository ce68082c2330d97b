"""Fixtures of the tests of secure sums."""

from pathlib import Path

import pytest

from tests.bench import Bench, Home, home, model_files
from tests.federation.secure_sum.pooled_sums import METHOD, SETTINGS
from tests.methods.promises.secure_sum_promises import SECURE, silent_from


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def bench(tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    return Bench(tmp_path, METHOD, SETTINGS | SECURE, home=shared)


@pytest.fixture(scope="module")
def plain(shared: Home, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, bytes]]:
    """Return the results of plain sums with all clients (True) and without client 2 (False)."""
    found = {}
    for everybody in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            folder = tmp_path_factory.mktemp("plain")
            monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
            monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
            one = Bench(folder, METHOD, SETTINGS, home=shared)
            grid = one.grid()
            if not everybody:
                grid.tamper[2] = silent_from("train")
            found[everybody] = model_files(one.run(grid))
    return found
