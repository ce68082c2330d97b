"""FLoRA (Wang et al. 2024): stacked LoRA adapters of any rank, folded into the base.

A round has three steps. Every client makes new adapters of its own rank, and trains them over the
base with everything that was folded in before. The server stacks them, so that the product is the
weighted mean of the updates, exactly. It sends the sum of all stacks before the next round.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from espalier.models.adapters import Adapter, Tensors
from espalier.training.initial_values import initial_adapters
from pruning_kernels.lora.factors import Factors
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.folded_updates import FoldedResult
from strategies.base.inbox import Inbox


class StackedResult(FoldedResult):
    """Stacked updates of all rounds, and the adapters with which clients begin the next one."""

    def beginnings(self, limits: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the tensors with which clients begin a round, blob by blob, in full rank."""
        # The adapters of a round are new, so their initial values follow from round and seed.
        for key in self.blobs:
            yield key, self.tensors(key)

    def first_of(self, server_round: int) -> Tensors:
        """Return the initial adapters of a round."""
        return initial_adapters(
            self.adapters, self.job.adapter_seed(self.settings.seed, server_round)
        )

    def stacked(
        self,
        server_round: int,
        first: Tensors,
        key: str,
        adapter: Adapter,
        factors: list[Factors],
        weights: list[float],
    ) -> dict[str, Tensor]:
        """Return the adapter of the next round, and the folded update with this round's mean."""
        block = first[key]
        return {
            adapter.name_a: block[adapter.name_a],
            # B starts at zero, so the new adapter adds nothing to the folded sum.
            adapter.name_b: torch.zeros_like(block[adapter.name_b]),
            **self.with_stacked(server_round, key, adapter, factors, weights),
        }


class Flora(Tuning):
    """Strategy of FLoRA: stacking of adapters."""

    RESULT = StackedResult
    result: StackedResult

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Stack the adapters blob by blob, in client order, and fold them into the base."""
        # Initial adapters of the next round: the averaged blobs are replaced by them.
        first = self.result.first_of(server_round + 1)
        mean = partial(self.result.stacked, server_round, first)
        self.averager.fold(server_round, inbox, clients, mean)
        self.result.finish(server_round)
