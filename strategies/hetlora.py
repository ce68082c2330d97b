"""HetLoRA (Cho et al. 2024): federated averaging of LoRA adapters with a rank per client.

A round has three steps. Distribution by truncation: a client of rank r_k receives the first r_k
columns of B and rows of A. Local training with rank self-pruning: a client removes its last ranks
if they became weaker. Aggregation: A and B are padded with zeros to the largest rank, and a
client's weight is the Frobenius norm of its update. With ``aggregation = "svd"`` the updates B A
are averaged instead, and the best low-rank approximation is kept; truncation then gives each client
the best approximation of its rank.
"""

import math
from typing import Any

from espalier.messages.local_baseline import Alone
from espalier.methods.hetlora.settings import HetLoRASettings
from espalier.models.plan import block_key
from pruning_kernels.lora.factors import norm
from strategies.averaging.client_weights import counted_capabilities
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.fedpetuning.strategy import FedPETuning


class HetLoRA(FedPETuning):
    """FedPETuning with a rank per client.

    The parameters are those of ``FedPETuning``.
    """

    _ranks: dict[int, int] | None = None
    """Rank r_k of each client in its next round; None before the first round."""
    _norms: dict[int, float]
    """Norm ||Delta W_k|| of the round's clients."""

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.hetlora = run.settings.of(HetLoRASettings)

    def state(self) -> dict[str, Any]:
        """Return the global adapters and every client's rank."""
        ranks = (
            {}
            if self._ranks is None
            else {"ranks": {str(client): rank for client, rank in self._ranks.items()}}
        )
        return super().state() | ranks

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self._ranks = {int(client): rank for client, rank in state["ranks"].items()}

    def summary(self) -> None:
        """Show the method, its main settings and the clients' ranks."""
        super().summary()
        ranks = ", ".join(
            f"{seat.site} {self.limit_of(seat)}" for seat in self.rounds.roster.active()
        )
        self.run.progress.note("ranks", f"ranks        {ranks}")

    # ----- the clients' ranks ---------------------------------------------------------------------

    def limit_of(self, seat: Seat) -> int:
        """Return r_k, the present rank of a client."""
        if self._ranks is None:
            self._ranks = self._first_ranks()
        return self._ranks[seat.client]

    def alone_order(self, seat: Seat) -> Alone:
        """Return the order for a local baseline with the client's first rank."""
        return Alone(rank_limit=self._first_ranks()[seat.client])

    def _first_ranks(self) -> dict[int, int]:
        """Return the initial ranks: those of the settings, or in proportion to capability.

        The most capable client gets the full rank of the adapters. In the paper, ranks lie between
        r_min and r_max according to the device, by an unspecified rule; here r_max is ``lora.rank``
        and r_min is at least 1. Stated capabilities are limited relative to the median.

        Raises
        ------
        InputError
            Some sites measured their capability and others state theirs.
        """
        seats = self.rounds.roster.seats
        lora = self.run.settings.lora
        if self.hetlora.ranks:
            return {client: self.hetlora.rank_limit_of(client, lora) for client in seats}
        counted = counted_capabilities(self.rounds, "hetlora.ranks")
        most = max(counted.values())
        return {
            client: max(1, round(lora.rank * (value / most))) for client, value in counted.items()
        }

    def settle(self, inbox: Inbox, clients: list[int]) -> None:
        """Compute the clients' weights, and adopt the ranks that self-pruning left."""
        if self.federation.client_weights == "norms":
            self._norms = self._norms_of(inbox, clients)
        for client in clients:
            seat = self.rounds.roster.seats[client]
            left = self._told[client].rank
            if left < self.limit_of(seat):
                text = f"{seat.site} goes on with rank {left} of {self.limit_of(seat)}"
                self.run.progress.note("rank_pruned", text, client=client, lora_rank=left)
        self._ranks = (self._ranks or {}) | {client: self._told[client].rank for client in clients}

    # ----- the clients' weights -------------------------------------------------------------------

    def _norms_of(self, inbox: Inbox, clients: list[int]) -> dict[int, float]:
        """Return ||Delta W_k||_F over all adapted matrices of each client; all 1 if all are 0.

        The paper writes Delta W_k = B_k A_k for all LoRA modules of a client together and gives
        each client one weight. So the norm treats the matrices as one long vector, and all matrices
        of a client have the same weight.
        """
        squares: dict[int, list[float]] = {client: [] for client in clients}
        for index, adapter in self.averaged.adapters:
            found = self._factors(inbox, block_key(index), adapter, clients)
            for client, factors in zip(clients, found, strict=True):
                squares[client].append(norm(factors) ** 2)
        norms = {client: math.sqrt(math.fsum(values)) for client, values in squares.items()}
        return norms if any(norms.values()) else dict.fromkeys(clients, 1.0)

    def _claimed_weight(self, client: int) -> float:
        return (
            self._norms[client]
            if self.federation.client_weights == "norms"
            else super()._claimed_weight(client)
        )
