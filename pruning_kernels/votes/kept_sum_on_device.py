"""Sums of a ``KeptMean`` on a CUDA device.

Clients are added one after the other, so that the bits equal those on the CPU.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.votes.bitmask import Words
from pruning_kernels.votes.bitmask_on_device import unpack_on_device


class DeviceSums:
    """Sums of kept weights and of their clients' weights on a device, (size,) float32."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._total = torch.zeros(size, dtype=torch.float32, device=device)
        self._weights = torch.zeros(size, dtype=torch.float32, device=device)

    def add(self, prune_mask: Words, kept: NDArray[np.float32], scale: np.float32) -> None:
        """Add one client's kept weights, in the order of the matrix, times ``scale``."""
        keep = ~unpack_on_device(prune_mask, len(self._total), self._total.device)
        scaled = torch.from_numpy(kept).to(self._total.device) * float(scale)
        self._total += torch.zeros_like(self._total).masked_scatter_(keep, scaled)
        self._weights += keep * float(scale)

    def mean(self, weight: np.float32 | None) -> NDArray[np.float32]:
        """Return the sum divided by ``weight``, or per element by the weights of its keepers.

        Elements that no client kept are zero.
        """
        # CUDA multiplies by the reciprocal of a Python number; it divides by a tensor.
        divisor = self._weights
        if weight is not None:
            divisor = torch.tensor(float(weight), device=self._total.device)
        found: Tensor = self._total / divisor
        return torch.where(self._weights > 0, found, 0.0).cpu().numpy()
