"""Fixtures that run a test on every implementation that must give the same bits (see ``way``)."""

from collections.abc import Iterator

import pytest
import torch

from pruning_kernels import sparsegpt
from pruning_kernels.selection import selection
from pruning_kernels.votes import kept_mean, votes
from pruning_kernels.votes.device_votes import DeviceVotes
from tests.devices import CPU, DEVICES, tests_work_on, working_on

NEVER = 1 << 62


@pytest.fixture(params=["compiled", "plain", "torch", DEVICES[1]], scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Device of the scores; a module runs with all its tests on each implementation.

    ``plain`` is NumPy with a stable sort, ``compiled`` the numba kernels for large matrices,
    ``cuda`` the code for a CUDA device, and ``torch`` the same code on CPU tensors, with votes
    counted without Triton.
    """
    device = request.param if isinstance(request.param, torch.device) else CPU
    with pytest.MonkeyPatch.context() as monkeypatch, working_on(device):
        for module in (selection, votes):
            monkeypatch.setattr(
                module, "WORTH_COMPILING", 0 if request.param == "compiled" else NEVER
            )
        if request.param not in ("compiled", "plain"):
            monkeypatch.setattr(selection, "_select_sorted", selection._select_on_device)
            monkeypatch.setattr(
                votes, "VoteCounter", lambda shape, voters: DeviceVotes(shape, voters, device)
            )
        yield device


@pytest.fixture(params=["compiled", "plain"], scope="module")
def compiled_or_plain(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run kernels without device code as compiled code and as plain code."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (kept_mean, selection, sparsegpt, votes):
            monkeypatch.setattr(
                module, "WORTH_COMPILING", 0 if request.param == "compiled" else NEVER
            )
        yield


@pytest.fixture(params=["compiled", "plain", DEVICES[1]], scope="module")
def compiled_plain_or_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the kernels compiled, plain, and plain on tensors of a CUDA device."""
    device = request.param if isinstance(request.param, torch.device) else CPU
    with pytest.MonkeyPatch.context() as monkeypatch, working_on(device), tests_work_on(device):
        for module in (selection, sparsegpt):
            monkeypatch.setattr(
                module, "WORTH_COMPILING", 0 if request.param == "compiled" else NEVER
            )
        yield
