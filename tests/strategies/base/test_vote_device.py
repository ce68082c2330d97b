"""The server tests before the run whether its device can count votes."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from strategies.base import public_samples
from strategies.base.public_samples import require_counting


def kernel_that(count_votes: Any, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a device that counts votes with this function.

    Its tensors have no numbers, because nothing reads them before the kernel is called.
    """
    module = ModuleType("pruning_kernels.votes.vote_planes_cuda")
    module.count_votes = count_votes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return torch.device("meta")


def test_a_device_that_counts_is_taken(device: torch.device) -> None:
    require_counting(device, "auto")


def test_device_without_compiler_gets_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count_votes(*_: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    with pytest.raises(
        EspalierError,
        match=r"device = 'auto': .*Failed to find C compiler.*install gcc, or set device to 'cpu'",
    ):
        require_counting(kernel_that(count_votes, monkeypatch), "auto")


def test_a_device_without_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pruning_kernels.votes.vote_planes_cuda", None)
    with pytest.raises(EspalierError, match=r"device = 'cuda': .*ModuleNotFoundError"):
        require_counting(torch.device("meta"), "cuda")


def test_miscounting_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pruning_kernels.votes.device_votes import DeviceVotes

    monkeypatch.setattr(
        public_samples,
        "vote_counter",
        lambda shape, voters, _: DeviceVotes(shape, voters, torch.device("cpu")),
    )
    monkeypatch.setattr(
        "pruning_kernels.votes.device_votes.count_one_by_one", lambda masks, planes: planes.zero_()
    )
    with pytest.raises(EspalierError, match="it counts the votes wrongly"):
        require_counting(torch.device("meta"), "cuda")
