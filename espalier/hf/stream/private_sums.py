"""Sums of squared inputs over the records of one party, with a bound on each record and noise.

For every input of a block's matrices, a record or group has a vector: the sum of squares of each
channel over its tokens. It is divided by its L2 norm, so that every record counts with norm 1
whatever its length, and no bound has to be chosen. Wanda and RIA compare the weights of a matrix,
all of which have the same input, so only the direction of a sum matters, and not its size.

With M inputs in the model, one record changes the vector of all sums by at most sqrt(M). All sums
are therefore one Gaussian mechanism, with noise of sqrt(M) times the noise multiplier. If parties
share the noise of their sum, the noise of each is smaller, and only the sum is this mechanism: a
sum of discrete Gaussians of a deviation s has the distribution of one with the summed variances, up
to a total variation distance below 10 exp(-pi^2 s^2) for each of them (Kairouz, Liu and Steinke
2021, "The Distributed Discrete Gaussian Mechanism", lemma 12), which is 0 for s of 2^29 and more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import observed_pass
from espalier.hf.stream.input_statistics import InputObserver
from espalier.messages.tensor_blobs import pack_tensors
from espalier.methods.pruning.pooled_pruning import COUNT, num_inputs, shared_inputs, squares_name
from espalier.models.plan import BlockPlan
from espalier.privacy.noise import RandomBits
from espalier.progress import report_each
from pruning_kernels.fixed_point import words_of
from pruning_kernels.record_bound import normalised


class RecordSquares(InputObserver[Tensor]):
    """Sum over records of the direction of their squared inputs, per input of a block.

    ``found`` returns integers on the grid of ``noise.py``, (channels,), int64.
    """

    def __init__(
        self,
        linears: dict[str, nn.Linear],
        *,
        lengths: Tensor,
        records: Tensor,
        padded_to: int,
    ) -> None:
        super().__init__(linears)
        self._padded_to = padded_to
        self._lengths = lengths
        self._records = records
        # Number of sequences that each linear has seen.
        self._rows = dict.fromkeys(linears, 0)
        # Record whose sequences may continue in the next batch, and its sum so far.
        self._open: dict[str, tuple[int, Tensor]] = {}
        self._sums: dict[str, Tensor] = {
            name: torch.zeros(linear.in_features, dtype=torch.int64)
            for name, linear in linears.items()
        }

    def _see(self, name: str, inputs: Tensor) -> None:
        """Add the sequences of one batch; those of a record may continue in the next batch."""
        # OPT flattens samples and tokens itself.
        tokens = inputs.reshape(-1, self._padded_to, inputs.shape[-1]).double()
        rows = slice(self._rows[name], self._rows[name] + len(tokens))
        self._rows[name] = rows.stop
        # Padding counts as zero.
        token_mask = torch.arange(self._padded_to)[None] < self._lengths[rows, None]
        squares = torch.einsum("rtc,rt->rc", tokens.square(), token_mask.to(tokens)).cpu()
        # Sequences of a record follow each other, so a batch has few records.
        records, record_index = torch.unique_consecutive(self._records[rows], return_inverse=True)
        sums = squares.new_zeros(len(records), squares.shape[1]).index_add_(
            0, record_index, squares
        )
        # The first record of this batch may have begun in the one before.
        if name in self._open:
            record, open_sum = self._open.pop(name)
            if record == int(records[0]):
                sums[0] += open_sum
            else:
                self._close(name, open_sum[None])
        # The last record may continue.
        self._close(name, sums[:-1])
        self._open[name] = (int(records[-1]), sums[-1])

    def _close(self, name: str, vectors: Tensor) -> None:
        # One record counts with norm 1, whatever its length.
        self._sums[name] += normalised(vectors).sum(dim=0)

    def found(self) -> dict[str, Tensor]:
        """Return the sums by canonical linear name."""
        for name, (_, open_sum) in self._open.items():
            self._close(name, open_sum[None])
        self._open.clear()
        return self._sums


@dataclass(frozen=True)
class PrivateSums:
    """Noisy sums of one party, block by block."""

    stream: BlockStream
    noise_multiplier: float
    """Standard deviation of the party's noise divided by the sensitivity of all sums together."""
    bits: RandomBits

    @torch.no_grad()
    def blobs(self, samples: Tensor, lengths: Tensor, records: Sequence[int]) -> Iterator[bytes]:
        """Yield the blob of each block.

        Parameters
        ----------
        samples, lengths : padded sequences and their lengths (``privacy_units.padded``); there may
            be none
        records : number of the record or group of each sequence; those of a record follow each
            other
        """
        plan = self.stream.model.plan
        # One record changes M sums by 1 each, so the L2 sensitivity is sqrt(M).
        deviation = self.noise_multiplier * math.sqrt(num_inputs(plan))
        record_ids = torch.tensor(records)
        activations = self.stream.start(samples) if len(samples) else None
        for block in report_each(plan.blocks, "watching block"):
            # Without records the noise alone is sent, so nothing shows that there were none.
            sums: Mapping[str, Tensor] = _no_sums(block)
            if activations is not None:
                with self.stream.block(block.index, following=block.index + 1) as loaded:
                    linears = self.stream.linears(block.index, loaded)
                    # One linear per distinct input.
                    observer = RecordSquares(
                        {name: linears[name] for name in sums},
                        lengths=lengths,
                        records=record_ids,
                        padded_to=samples.shape[1],
                    )
                    sums = observed_pass(activations, block.index, loaded, observer, keep=True)
            yield self._packed(sums, deviation)

    def _packed(self, sums: Mapping[str, Tensor], deviation: float) -> bytes:
        """Return the sums of a block with noise; the count is always 1."""
        words = {}
        # Sorted, so that noise is drawn in a fixed order.
        for name, exact in sorted(sums.items()):
            noise = self.bits.grid_noise(len(exact), deviation)
            # Sums and noise are integers of the same grid.
            words[squares_name(name)] = words_of(exact.numpy() + noise)
        return pack_tensors({**words, COUNT: np.array([1], np.uint64)})


def _no_sums(block: BlockPlan) -> dict[str, Tensor]:
    """Return the sums of no record."""
    return {
        name: torch.zeros(block.linear(name).shape[1], dtype=torch.int64)
        for name in sorted(set(shared_inputs(block).values()))
    }
