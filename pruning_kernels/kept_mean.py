"""The l0 mean of pruned matrices: for each weight, the mean over the clients that kept it (FedSpaLLM equation 5).

As printed, the denominator of equation 5 is the number of weights that anybody kept; what the text and Figure 2 describe, and
what is computed here, is elementwise: the sum of the kept values over the number of those who kept the weight. One sum and
one bit-sliced count are held, whatever the number of clients; clients are added one after the other, in an order that the
caller fixes, so that a float sum repeats bit by bit.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pruning_kernels.bitmask import Words, unpack
from pruning_kernels.compiled import WORTH_COMPILING, use_threads_of_torch

Aggregation = Literal["l0", "mean"]
"""``l0``: over the clients that kept the weight; ``mean``: over all of them, a pruned weight counting as zero."""


class KeptMean:
    """The mean of one matrix, client by client.

    Parameters
    ----------
    shape : (rows, columns)
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._sum = np.zeros(shape[0] * shape[1], np.float32)
        self._weight_of_keepers = np.zeros(shape[0] * shape[1], np.float32)
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
        num_kept = self._sum.size - int(np.bitwise_count(prune_mask).sum(dtype=np.int64))
        if kept.shape != (num_kept,):
            raise ValueError(f"the mask keeps {num_kept} weights, {kept.shape} were given")
        self._weight += weight
        scale = np.float32(weight)
        if self._sum.size >= WORTH_COMPILING:
            from pruning_kernels.kept_sum import add_kept

            use_threads_of_torch()
            add_kept(self._sum, self._weight_of_keepers, prune_mask, kept, scale)
            return
        keep = ~unpack(prune_mask, (self._sum.size,))
        self._sum[keep] += kept * scale
        self._weight_of_keepers[keep] += scale

    def mean(self, aggregation: Aggregation = "l0") -> NDArray[np.float32]:
        """The mean, float32, shaped like the matrix; zero where nobody kept the weight. The sum is used up."""
        if aggregation == "mean":
            self._sum /= np.float32(self._weight)
        else:
            np.divide(self._sum, self._weight_of_keepers, out=self._sum, where=self._weight_of_keepers > 0)
        return self._sum.reshape(self.shape)
