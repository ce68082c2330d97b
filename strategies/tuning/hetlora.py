"""HetLoRA (Cho et al. 2024): federated averaging of LoRA adapters with a rank per client.

A round has three steps. Distribution by truncation: a client of rank r_k receives the first r_k
columns of B and rows of A. Local training with rank self-pruning: a client removes its last ranks
if they became weaker. Aggregation: A and B are padded with zeros to the largest rank, and a
client's weight is the Frobenius norm of its update. With ``aggregation = "svd"`` the updates B A
are averaged instead, and the best low-rank approximation is kept; truncation then gives each client
the best approximation of its rank. With ``rank-weights = "holders"`` (raFLoRA, Wu et al. 2026) each
rank is averaged over the clients that hold it.
"""

import math
from functools import partial
from typing import Any

from torch import Tensor

from espalier.messages.local_baseline import BaselineOrder
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.models.adapters import Adapter
from espalier.models.plan import block_key
from pruning_kernels.lora.factors import Factors, norm
from pruning_kernels.lora.rank_means import holder_mean, holder_update_mean
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.client_weights import counted_capabilities
from strategies.averaging.ranked_adapters import RankedResult
from strategies.averaging.updates import Updates
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run


class HetLoRA(Tuning):
    """Strategy of HetLoRA: averaging of adapters with a rank per client."""

    RESULT = RankedResult
    result: RankedResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation, rank_of=self._rank_of)
        self.job = run.settings.of(HetLoRASettings)
        self._ranks: dict[int, int] | None = None
        """Rank r_k of each client in its next round; None before the first round."""

    def description(self) -> str:
        """Return the main settings and the clients' ranks in words."""
        seats = self.rounds.roster.active()
        ranks = ", ".join(f"{seat.site} {self._rank_of(seat)}" for seat in seats)
        return f"{super().description()}, ranks: {ranks}"

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters, and adopt the ranks that self-pruning left."""
        averager = self.averager
        updates = averager.updates(server_round, inbox, clients)
        # Norms of the limited updates: a client cannot buy weight by size.
        by_norms = self.run.settings.federation.client_weights == "norms"
        weights = self._norms(updates) if by_norms else averager.samples_of(updates.clients)
        # Ranks of this round are used below from the reports; the next round starts with these.
        self._adopt_ranks(updates.clients)
        averager.note_times(server_round, updates.clients)
        mean = None
        if self.job.rank_weights == "holders":
            # Ranks that clients hold, not the limits that they were given.
            ranks = [averager.reports[client].rank for client in updates.clients]
            mean = partial(self._mean_of_holders, ranks)
        averager.average(updates, weights, averager.limits_after(server_round), mean)
        self._note_energy(server_round)

    def local_baseline_request(self, seat: Seat) -> BaselineOrder | None:
        """Return the order for a local baseline with the client's first rank."""
        if super().local_baseline_request(seat) is None:
            return None
        return BaselineOrder(rank_limit=self._first_ranks()[seat.client])

    def state(self) -> dict[str, Any]:
        """Return the global adapters and every client's rank."""
        state = super().state()
        if self._ranks is not None:
            state["ranks"] = {str(client): rank for client, rank in self._ranks.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self._ranks = {int(client): rank for client, rank in state["ranks"].items()}

    # ----- the clients' ranks ---------------------------------------------------------------------

    def _rank_of(self, seat: Seat) -> int:
        """Return r_k, the present rank of a client."""
        if self._ranks is None:
            self._ranks = self._first_ranks()
        return self._ranks[seat.client]

    def _first_ranks(self) -> dict[int, int]:
        """Return the initial ranks: those of the settings, or in proportion to capability.

        The most capable client gets the full rank of the adapters. In the paper, ranks lie between
        r_min and r_max according to the device, by an unspecified rule; here r_max is ``lora.rank``
        and r_min is at least 1. Stated capabilities are limited relative to the median.
        """
        seats = self.rounds.roster.seats
        lora = self.run.settings.lora
        if self.job.ranks:
            # Given by the settings.
            return {client: self.job.rank_limit_of(client, lora) for client in seats}
        counted = counted_capabilities(self.rounds, "lora.ranks")
        largest = max(counted.values())
        # At least 1, so that a slow client can take part.
        return {
            client: max(1, round(lora.rank * (value / largest)))
            for client, value in counted.items()
        }

    def _adopt_ranks(self, clients: list[int]) -> None:
        """Use the ranks that self-pruning left in the clients' next rounds."""
        ranks = {client: self.averager.reports[client].rank for client in clients}
        for client, rank in ranks.items():
            seat = self.rounds.roster.seats[client]
            if rank < self._rank_of(seat):
                text = f"{seat.site} continues with rank {rank} of {self._rank_of(seat)}"
                self.run.progress.note("rank_pruned", text, client=client, lora_rank=rank)
        # Clients without a reply keep their rank.
        self._ranks = (self._ranks or {}) | ranks

    # ----- the ranks of the mean ------------------------------------------------------------------

    def _mean_of_holders(
        self,
        ranks: list[int],
        key: str,
        adapter: Adapter,
        factors: list[Factors],
        weights: list[float],
    ) -> dict[str, Tensor]:
        """Return the mean of one matrix's adapters, each rank over the clients that hold it."""
        tensors = self.result.tensors(key)
        before = Factors(tensors[adapter.name_b], tensors[adapter.name_a], adapter.scaling)
        mean = holder_update_mean if self.job.averages_updates else holder_mean
        # As in the mean of all: no client has more than this part of the weight.
        counted = sum(weight > 0 for weight in weights)
        max_share = min(1.0, self.run.settings.federation.weight_limit / max(counted, 1))
        averaged = mean(factors, ranks, weights, before, max_share)
        return adapter.named(averaged.b, averaged.a)

    def _note_energy(self, server_round: int) -> None:
        """Record the energy of each rank of the new global update, and show the first and last."""
        shares = self.result.note_energy(server_round)
        text = (
            f"energy       rank 1 has {100 * shares[0]:.3g}%,"
            f" rank {len(shares)} {100 * shares[-1]:.3g}%"
        )
        self.run.progress.note("rank_energy", text, shares=shares)

    # ----- the clients' weights -------------------------------------------------------------------

    def _norms(self, updates: Updates) -> dict[int, float]:
        """Return ||Delta W_k||_F over all adapted matrices of each client; all 1 if all are 0.

        The paper writes Delta W_k = B_k A_k for all LoRA modules of a client together and gives
        each client one weight. So the norm treats the matrices as one long vector, and all matrices
        of a client have the same weight.
        """
        squares: dict[int, list[float]] = {client: [] for client in updates.clients}
        # Matrix by matrix, because all factors of all clients would not fit in memory.
        for index, adapter in self.result.adapters:
            all_factors = updates.factors(block_key(index), adapter)
            for client, factors in zip(updates.clients, all_factors, strict=True):
                squares[client].append(norm(factors) ** 2)
        # ``fsum`` is exact, so the order of matrices has no effect.
        norms = {client: math.sqrt(math.fsum(values)) for client, values in squares.items()}
        # Until a B has been trained all norms are 0.
        return norms if any(norms.values()) else dict.fromkeys(updates.clients, 1.0)
