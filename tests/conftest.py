"""What tests of several rooms share."""

import gc
import os
from collections import Counter
from collections.abc import Iterator

# Workers share the cores: threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch
from devices import DEVICES, tests_work_on, working_on

hypothesis.settings.register_profile("espalier", deadline=None)  # a busy machine is no mistake
hypothesis.settings.load_profile("espalier")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests of a file together where pytest-xdist deals them out: many share processes or a model."""
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadscope", False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes first, which mostly wait, then files with many tests: so workers end together."""
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("processes") is None, -number[item.path]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there by now, libraries and thousands of tests, stays: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Private state lies in a directory of this process, apart from the user's own and from other processes of tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts() -> Iterator[None]:
    """No test looks at a disk whose power was cut, so nothing waits for it; when files are synced, some tests note."""

    def sync(handle: int) -> None:
        os.fstat(handle)  # what is not open is still refused

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", sync)
        yield


@pytest.fixture(autouse=True)
def short_public_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of tests evaluate on less than real ones do."""
    monkeypatch.setattr("espalier.wire.evaluation.LEAST_PREDICTIONS", 15)
    monkeypatch.setattr("espalier.wire.evaluation.LEAST_ITEMS", 1)


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Every device in turn; without a CUDA device its tests are skipped."""
    with working_on(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def tests_on_device(device: torch.device) -> Iterator[None]:
    """The tensors that a test makes lie on every device in turn."""
    with tests_work_on(device):
        yield
