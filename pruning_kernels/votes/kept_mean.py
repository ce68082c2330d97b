"""l0 mean of pruned matrices: the mean of each weight over the clients that kept it.

Source: FedSpaLLM equation 5. As printed, its denominator is the number of weights that any client
kept. Text and Figure 2 describe an elementwise mean, which is computed here. Memory holds a sum and
a sum of client weights per element, whatever the number of clients. Clients are added one after the
other in an order that the caller fixes, so that float sums repeat bit by bit on every device.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pruning_kernels.compiler import WORTH_COMPILING, use_threads_of_torch
from pruning_kernels.votes.bitmask import Words, count, unpack
from pruning_kernels.votes.bitmask_on_device import unpack_on_device

CPU = torch.device("cpu")
Aggregation = Literal["l0", "mean"]
"""Divisor of the mean.

- ``l0``: the clients that kept the weight
- ``mean``: all clients; a pruned weight counts as zero
"""


def kept_mean(shape: tuple[int, int], device: torch.device = CPU) -> "KeptMean":
    """Return a mean without clients, whose sums are on a device."""
    return KeptMean(shape) if device.type == "cpu" else DeviceMean(shape, device)


class KeptMean:
    """Mean of one matrix, accumulated client by client, with (size,) float32 sums on the CPU."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._size = shape[0] * shape[1]
        self._weight = 0.0
        self._make_sums()

    def _make_sums(self) -> None:
        self._total = np.zeros(self._size, np.float32)
        self._weights = np.zeros(self._size, np.float32)

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
        # Check the length before reading: the kernel reads ``kept`` by the mask's bits.
        num_kept = self._size - count(prune_mask)
        if kept.shape != (num_kept,):
            raise ValueError(f"the mask keeps {num_kept} weights, {kept.shape} were given")
        # In float64: the divisor of ``mean``; whole numbers of samples are exact.
        self._weight += weight
        self._add(prune_mask, kept, np.float32(weight))

    def _add(self, prune_mask: Words, kept: NDArray[np.float32], weight: np.float32) -> None:
        if self._size >= WORTH_COMPILING:
            from pruning_kernels.votes.kept_sum import add_kept

            use_threads_of_torch()
            add_kept(self._total, self._weights, prune_mask, kept, weight)
            return
        keep = ~unpack(prune_mask, (self._size,))
        self._total[keep] += kept * weight
        self._weights[keep] += weight

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """Return the mean, float32, shaped like the matrix; the sums cannot be used afterwards.

        Weights that no client kept are zero.
        """
        # In place: the result needs no third matrix.
        if aggregation == "mean":
            # float32, as on a device, so that both give the same bits.
            self._total /= np.float32(self._weight)
        else:
            # Weights without a client stay 0.
            np.divide(self._total, self._weights, out=self._total, where=self._weights > 0)
        return self._total.reshape(self.shape)


class SummedMean(KeptMean):
    """Mean of one matrix whose sums are known already.

    Parameters
    ----------
    total : (size,), float64: sum of the kept weights of all clients
    keepers : (size,): number of clients that kept each weight
    num_clients : number of clients
    """

    def __init__(
        self,
        shape: tuple[int, int],
        total: NDArray[np.float64],
        keepers: NDArray[np.integer],
        num_clients: int,
    ) -> None:
        self.shape = shape
        self._sum = total
        self._keepers = keepers
        self._num_clients = num_clients

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """Return the mean, float32, shaped like the matrix, rounded once."""
        divisor = self._keepers if aggregation == "l0" else np.int64(self._num_clients)
        mean = np.zeros(self._sum.shape)
        np.divide(self._sum, divisor, out=mean, where=self._keepers > 0)
        return mean.astype(np.float32).reshape(self.shape)


class DeviceMean(KeptMean):
    """Mean whose sums are on a device; inputs and results are NumPy arrays."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._device = device
        super().__init__(shape)

    def _make_sums(self) -> None:
        self._sums = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        self._keepers = torch.zeros_like(self._sums)

    def _add(self, prune_mask: Words, kept: NDArray[np.float32], weight: np.float32) -> None:
        keep = ~unpack_on_device(prune_mask, self._size, self._device)
        # The kept weights, in order, go to the places that the mask keeps.
        scaled = torch.from_numpy(kept).to(self._device) * float(weight)
        self._sums += torch.zeros_like(self._sums).masked_scatter_(keep, scaled)
        self._keepers += keep * float(weight)

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """Return the mean, float32, shaped like the matrix."""
        divisor = self._keepers
        if aggregation == "mean":
            # CUDA multiplies by the reciprocal of a Python number; it divides by a tensor.
            divisor = torch.tensor(float(np.float32(self._weight)), device=self._device)
        mean = torch.where(self._keepers > 0, self._sums / divisor, 0.0)
        return mean.cpu().numpy().reshape(self.shape)
