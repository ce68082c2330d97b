"""Fixtures of the tests of resumption."""

import pytest

from tests.federation.resuming.interrupted_runs import Interrupted, interrupted


@pytest.fixture(scope="module")
def one_killed(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return interrupted(tmp_path_factory.mktemp("one"), "fedprllm")
