"""The devices that tests run on: the CPU everywhere, a CUDA device where there is one."""

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=NEEDS_CUDA)]


def assert_close(found: torch.Tensor, expected: torch.Tensor, cpu: float = 1e-5, cuda: float = 1e-4) -> None:
    """Results of a forward pass agree as closely as the device that made the first one allows."""
    tolerance = cpu if found.device.type == "cpu" else cuda
    torch.testing.assert_close(found, expected.to(found.device), rtol=tolerance, atol=tolerance)
