"""Fixtures and pytest settings that all tests share."""

import gc
import os
from collections import Counter
from collections.abc import Iterator

# Test workers share the cores, so threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

from espalier.settings.registry import METHODS
from tests.devices import DEVICES, tests_work_on, working_on
from tests.toy_method.contract import METHOD as TOY

# A busy machine must not make a test fail.
hypothesis.settings.register_profile("espalier", deadline=None)
hypothesis.settings.load_profile("espalier")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests of one file on one pytest-xdist worker: many share processes or a model."""
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadscope", False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with tests of real processes, then with files that have many tests.

    Tests of real processes mostly wait. This order lets all workers end at about the same time.
    """
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("processes") is None, -number[item.path]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt libraries and collected tests from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep private state in a directory of this process, apart from the user's own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts() -> Iterator[None]:
    """Replace ``os.fsync``: no test cuts the power, so no test has to wait for the disk.

    Tests that check when files are synced patch ``os.fsync`` themselves.
    """

    def sync(handle: int) -> None:
        # A closed file descriptor must still raise an error.
        os.fstat(handle)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", sync)
        yield


@pytest.fixture(autouse=True)
def short_public_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow evaluation on shorter texts than those of real sites."""
    monkeypatch.setattr("espalier.messages.evaluation.MIN_PREDICTIONS", 15)
    monkeypatch.setattr("espalier.messages.evaluation.MIN_ITEMS", 1)


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    """Add the toy method to the table of methods."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(METHODS, "toy", TOY)
        yield


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield every device in turn; CUDA tests are skipped on a machine without a CUDA device."""
    with working_on(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def tests_on_device(device: torch.device) -> Iterator[None]:
    """Put the tensors that a test creates on every device in turn."""
    with tests_work_on(device):
        yield
