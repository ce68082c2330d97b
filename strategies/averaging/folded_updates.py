"""Global adapters with updates that are folded into the base: exact means of high rank.

The server keeps the sum of all folded updates as two factors per matrix, and sends all of it before
every round. So a site that was away, or that lost its state, needs nothing else. The rank grows by
the same number in every round, until it is the smaller side of the matrix. The factors are those of
the sum's singular value decomposition, so a client can read the sum from them, and no other
client's adapters. If clients are missing, zeros take the place of their part, so that contracts
know all shapes from settings and round.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from espalier.hf.whole.folded_updates import joined_plan, joined_tensors
from espalier.methods.tuning.adapters.tensors import before_round
from espalier.models.adapters import Adapter
from pruning_kernels.lora.exact_means import residual_of_means, stacked_update, with_update
from pruning_kernels.lora.factor_means import zero_padded_mean
from pruning_kernels.lora.factors import Factors
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.written_adapters import WrittenAdapters


class FoldedResult(AdapterResult):
    """Global adapters, and the updates that are folded into the base."""

    STATE = (*AdapterResult.STATE, "folded")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.folded = 0
        """Rank of the folded updates, in matrices that are large enough."""

    def folded_after(self, server_round: int) -> int:
        """Return the rank of the folded updates after a round."""
        return before_round(self.adapters, self.settings, server_round + 1).folded

    def finish(self, server_round: int) -> None:
        """Record that the updates of a round are folded in all matrices."""
        self.folded = self.folded_after(server_round)

    def with_residual(
        self,
        server_round: int,
        key: str,
        adapter: Adapter,
        factors: list[Factors],
        weights: list[float],
    ) -> dict[str, Tensor]:
        """Return the means of A and B, and the folded update with this round's residual."""
        mean = zero_padded_mean(factors, weights, adapter.rank)
        residual = residual_of_means(factors, weights)
        return adapter.named(mean.b, mean.a) | self._with(server_round, key, adapter, residual)

    def with_stacked(
        self,
        server_round: int,
        key: str,
        adapter: Adapter,
        factors: list[Factors],
        weights: Sequence[float],
    ) -> dict[str, Tensor]:
        """Return the folded update with the mean of this round's updates."""
        return self._with(server_round, key, adapter, stacked_update(factors, weights))

    def _with(
        self, server_round: int, key: str, adapter: Adapter, update: Factors
    ) -> dict[str, Tensor]:
        # Zero for matrices that are too small to need a folded update.
        rank = adapter.folded_rank(self.folded_after(server_round))
        if not rank:
            return {}
        tensors = self.tensors(key)
        if adapter.folded_b in tensors:
            before = tensors[adapter.folded_b], tensors[adapter.folded_a]
        else:
            # First round with a residual: nothing is folded yet.
            before = update.b[:, :0], update.a[:0]
        folded = with_update(Factors(*before, adapter.scaling), update, rank)
        return {adapter.folded_b: folded.b, adapter.folded_a: folded.a}

    def written(self) -> WrittenAdapters:
        """Return adapters that contain the folded updates, of a larger rank."""
        plain = super().written()
        if not self.folded:
            return plain
        # If all adapters are folded, the folded update is the whole result.
        alone = not self.job.sent_factors
        plan = joined_plan(self.adapters, self.folded, alone=alone)

        def joined(key: str) -> dict[str, Tensor]:
            return joined_tensors(plan, key, self.tensors(key), alone=alone)

        report = {**plain.report, "ranks": [next(adapter.rank for _, adapter in plan)]}
        return replace(plain, adapters=plan, tensors=joined, report=report)
