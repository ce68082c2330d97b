"""The l0 mean of pruned matrices: for each weight, the mean over the clients that kept it (FedSpaLLM equation 5).

As printed, the denominator of equation 5 is the number of weights that anybody kept; what the text and Figure 2 describe, and
what is computed here, is elementwise: the sum of the kept values over the number of those who kept the weight. One sum and
one bit-sliced count are held, whatever the number of clients; clients are added one after the other, in an order that the
caller fixes, so that a float sum repeats bit by bit.
"""

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pruning_kernels.bitmask import Words, unpack
from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch

CPU = torch.device("cpu")
Aggregation = Literal["l0", "mean"]
"""``l0``: over the clients that kept the weight; ``mean``: over all of them, a pruned weight counting as zero."""


class KeptMean:
    """The mean of one matrix, client by client.

    Parameters
    ----------
    shape : (rows, columns)
    device : where the sums are held and added to; what goes in and comes out is NumPy's
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
        kept : (weights that are kept,), in the order of the matrix
        weight : of this client in the mean; whole numbers are added without error

        Raises
        ------
        ValueError
            There are more or fewer kept weights than the mask says.
        """
        num_kept = self._size - int(np.bitwise_count(prune_mask).sum(dtype=np.int64))
        if kept.shape != (num_kept,):
            raise ValueError(f"the mask keeps {num_kept} weights, {kept.shape} were given")
        self._weight += weight
        self._sums.add(prune_mask, kept, np.float32(weight))

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """The mean, float32, shaped like the matrix; zero where nobody kept the weight. The sum is used up."""
        return self._sums.mean(np.float32(self._weight) if aggregation == "mean" else None).reshape(
            self.shape
        )


class Sums(Protocol):
    """What a ``KeptMean`` asks of the device that holds its sums."""

    def add(self, prune_mask: Words, kept: NDArray[np.float32], scale: np.float32) -> None: ...

    def mean(self, weight: np.float32 | None) -> NDArray[np.float32]: ...


def sums_on(device: torch.device, size: int) -> Sums:
    """Sums of nothing, on a device."""
    if device.type == "cpu":
        return HostSums(size)
    from pruning_kernels.kept_sum_on_device import DeviceSums

    return DeviceSums(size, device)


class HostSums:
    """The sum of kept weights and of their clients' weights, (size,) float32."""

    def __init__(self, size: int) -> None:
        self._total = np.zeros(size, np.float32)
        self._weights = np.zeros(size, np.float32)

    def add(self, prune_mask: Words, kept: NDArray[np.float32], scale: np.float32) -> None:
        """Add one client's kept weights, in the order of the matrix, times ``scale``."""
        if self._total.size >= WORTH_COMPILING:
            from pruning_kernels.kept_sum import add_kept

            use_threads_of_torch()
            add_kept(self._total, self._weights, prune_mask, kept, scale)
            return
        keep = ~unpack(prune_mask, (self._total.size,))
        self._total[keep] += kept * scale
        self._weights[keep] += scale

    def mean(self, weight: np.float32 | None) -> NDArray[np.float32]:
        """The sum over a weight, or over the weights of those who kept each; zero where nobody did."""
        if weight is not None:
            self._total /= weight
        else:
            np.divide(self._total, self._weights, out=self._total, where=self._weights > 0)
        return self._total
