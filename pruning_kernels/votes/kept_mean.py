"""l0 mean of pruned matrices: the mean of each weight over the clients that kept it.

Source: FedSpaLLM equation 5. As printed, its denominator is the number of weights that any client
kept. Text and Figure 2 describe an elementwise mean, which is computed here: the sum of the kept
values, divided by the number of clients that kept the weight. Memory holds a sum and a sum of
client weights per element, whatever the number of clients. Clients are added one after the other in
an order that the caller fixes, so that float sums repeat bit by bit.

Clients are added one after the other, so that the bits equal those on the CPU.
"""

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.votes.bitmask import Words, unpack
from pruning_kernels.votes.bitmask_on_device import unpack_on_device

CPU = torch.device("cpu")
Aggregation = Literal["l0", "mean"]
"""Divisor of the mean.

- ``l0``: the clients that kept the weight
- ``mean``: all clients; a pruned weight counts as zero
"""


class KeptMean:
    """Mean of one matrix, accumulated client by client.

    Parameters
    ----------
    shape : (rows, columns)
    device : device of the sums; inputs and results are NumPy arrays
    """

    def __init__(self, shape: tuple[int, int], device: torch.device = CPU) -> None:
        self.shape = shape
        self._size = shape[0] * shape[1]
        self._sums = sums_on(device, self._size)
        self._weight = 0.0

    def add(self, prune_mask: Words, kept: NDArray[np.float32], weight: float = 1.0) -> None:
        """Add one client.

        Parameters
        ----------
        prune_mask : packed, see ``bitmask``
        kept : (number of kept weights,), in the order of the matrix
        weight : weight of this client in the mean; whole numbers are added without rounding

        Raises
        ------
        ValueError
            The number of kept weights does not match the mask.
        """
        num_kept = self._size - int(np.bitwise_count(prune_mask).sum(dtype=np.int64))
        if kept.shape != (num_kept,):
            raise ValueError(f"the mask keeps {num_kept} weights, {kept.shape} were given")
        self._weight += weight
        self._sums.add(prune_mask, kept, np.float32(weight))

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """Return the mean, float32, shaped like the matrix; the sums cannot be used afterwards.

        Weights that no client kept are zero.
        """
        return self._sums.mean(np.float32(self._weight) if aggregation == "mean" else None).reshape(
            self.shape
        )


class Sums(Protocol):
    """Interface of the sums of a ``KeptMean`` on a device."""

    def add(self, prune_mask: Words, kept: NDArray[np.float32], scale: np.float32) -> None: ...

    def mean(self, weight: np.float32 | None) -> NDArray[np.float32]: ...


def sums_on(device: torch.device, size: int) -> Sums:
    """Return empty sums on a device."""
    if device.type == "cpu":
        return HostSums(size)

    return DeviceSums(size, device)


class HostSums:
    """Sums of kept weights and of their clients' weights on the CPU, (size,) float32."""

    def __init__(self, size: int) -> None:
        self._total = np.zeros(size, np.float32)
        self._weights = np.zeros(size, np.float32)

    def add(self, prune_mask: Words, kept: NDArray[np.float32], scale: np.float32) -> None:
        """Add one client's kept weights, in the order of the matrix, times ``scale``."""
        if self._total.size >= WORTH_COMPILING:
            from pruning_kernels.votes.kept_sum import add_kept

            use_threads_of_torch()
            add_kept(self._total, self._weights, prune_mask, kept, scale)
            return
        keep = ~unpack(prune_mask, (self._total.size,))
        self._total[keep] += kept * scale
        self._weights[keep] += scale

    def mean(self, weight: np.float32 | None) -> NDArray[np.float32]:
        """Return the sum divided by ``weight``, or per element by the weights of its keepers.

        Elements that no client kept are zero.
        """
        if weight is not None:
            self._total /= weight
        else:
            np.divide(self._total, self._weights, out=self._total, where=self._weights > 0)
        return self._total


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
