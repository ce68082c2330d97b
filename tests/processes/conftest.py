"""Result with which the tests of real processes compare."""

from pathlib import Path

import pytest

from tests.processes.deployment import espalier, federation
from tests.processes.interruptible_run import SETTINGS, SITES, results_of


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Execute the run without any disturbance and return its directory."""
    folder = tmp_path_factory.mktemp("whole")
    with federation(folder, SITES) as running:
        done = espalier(folder, "run", *SETTINGS, "--superlink", running.control)
        assert done.returncode == 0, done.stdout + done.stderr
    return results_of(folder)
