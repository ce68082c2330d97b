"""Run a test on both ways to the same result: plain NumPy or torch, and the compiled kernels of large matrices."""

import pytest

from pruning_kernels import kept_mean, selection, sparsegpt, votes

WAYS = {"plain": 1 << 62, "compiled": 0}


@pytest.fixture(params=sorted(WAYS), autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> str:
    """Which of them every test of the module takes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (kept_mean, selection, sparsegpt, votes):
            monkeypatch.setattr(module, "WORTH_COMPILING", WAYS[request.param])
        yield request.param
