"""Devices that tests run on: the CPU everywhere, and a CUDA device if the machine has one.

With ``PRETEND_CUDA=1`` in the environment, CUDA tests run on a pretended device
(``pretended_device``). It detects operations that mix tensors of two devices. It does not reproduce
the numerical results of a real device.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.pretended_device import pretended_device

PRETENDED = os.environ.get("PRETEND_CUDA") == "1" and not torch.cuda.is_available()
TESTS = str(Path(__file__).parent)
MAKERS = _device_constructors()
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DEVICES = [
    pytest.param(CPU, id="cpu"),
    pytest.param(CUDA, id="cuda", marks=() if PRETENDED else NEEDS_CUDA),
]


@contextmanager
def working_on(device: torch.device) -> Iterator[torch.device]:
    """Yield a real or pretended device while tests use it."""
    if device.type == "cuda" and PRETENDED:
        with pretended():
            yield device
    else:
        yield device


@contextmanager
def pretended() -> Iterator[None]:
    """Pretend a CUDA device, including its vote counter and its random generator."""
    with pretended_device(), _pretended_parts():
        yield


class _MadeByTests(TorchFunctionMode):
    """Move tensors that a test creates to a device, and tensors that it shows to NumPy to the CPU.

    Tensors of the tested code stay where that code puts them, so a forgotten device is detected.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return func(*args, **kwargs)
        if func is torch.Tensor.numpy:
            return func(args[0].cpu(), *args[1:], **kwargs)
        made = func in MAKERS and kwargs.get("device") is None
        found = func(*args, **kwargs)
        return found.to(self.device).requires_grad_(found.requires_grad) if made else found


@contextmanager
def tests_work_on(device: torch.device) -> Iterator[None]:
    """Put the tensors that tests create on a device that ``working_on`` gave."""
    if device.type == "cpu":
        yield
    else:
        with _MadeByTests(device):
            yield


@contextmanager
def _pretended_parts() -> Iterator[None]:
    """Replace the Triton kernel with torch code and the device's generator with that of the CPU."""
    from pruning_kernels.votes.device_votes import count_one_by_one

    name = "pruning_kernels.votes.vote_planes_cuda"
    kernel = ModuleType(name)
    kernel.count_votes = count_one_by_one  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, name, kernel)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "manual_seed", lambda _: None)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        if find_spec("bitsandbytes"):
            monkeypatch.setattr("bitsandbytes.nn.Params4bit.__new__", _not_pretended)
        yield


def _not_pretended(*_: Any, **__: Any) -> None:
    pytest.skip("tensors of bitsandbytes are of a class of their own, and need a real device")


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, cpu: float = 1e-5, cuda: float = 1e-4
) -> None:
    """Assert that results of a forward pass agree within the device's tolerance.

    The device of ``found`` selects the tolerance.
    """
    tolerance = cpu if found.device.type == "cpu" else cuda
    torch.testing.assert_close(found, expected.to(found.device), rtol=tolerance, atol=tolerance)
