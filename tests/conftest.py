"""What tests of several rooms share."""

import pytest
import torch
from devices import DEVICES


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device in turn; without a CUDA device its tests are skipped."""
    return request.param
