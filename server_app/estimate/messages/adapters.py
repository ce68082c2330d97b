"""Messages of the methods that average adapters: FedPETuning, HetLoRA, SFT-P."""

from functools import cache
from typing import Any

from espalier.messages.local_baseline import Alone
from espalier.methods.fedpetuning.contract import Order
from espalier.methods.fedpetuning.settings import AdapterAveraging
from espalier.methods.hetlora.settings import HetLoRASettings
from espalier.methods.sft_p.settings import SftPSettings
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factor_ranks import kept_rank
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages
from strategies.averaging.client_sampling import drawn


class Tuning(Messages):
    """Messages of a method whose adapters go up, and from the second round on also down."""

    first_delivery = 0
    """Number of the ``deliver`` in a round that pushes the first part of the adapters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job = self.settings.of(AdapterAveraging)
        self.drawn = cache(
            lambda server_round: frozenset(
                drawn(self.settings, server_round, self.seats_of_rounds())
            )
        )
        self._alike = cache(self._round)

    def seats_of_rounds(self) -> list[int]:
        """Return the clients from which those of a round are drawn."""
        return list(range(self.settings.num_clients))

    def limit_of(self, client: int, server_round: int) -> int:
        """Return the rank limit of a client in a round."""
        return self.job.rank_limit_of(client, self.settings.lora)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the adapters down (except in the first round) and up."""
        if client not in self.drawn(server_round):
            return []
        return self._alike(server_round, self.limit_of(client, server_round))

    def _round(self, server_round: int, limit: int) -> list[Exchange]:
        brought = self.adapters(server_round, limit, omitted=1) if server_round > 1 else []
        return brought + self.post.train(
            server_round, self.order(server_round, limit), {"rank_limit": limit, "rank": limit}
        )

    def order(self, server_round: int, limit: int) -> Order:
        """Return the fields of a ``train``."""
        return Order(rank_limit=limit)

    def adapters(self, server_round: int, limit: int, omitted: int) -> list[Exchange]:
        """Return the messages that push the global adapters, without the last ``omitted`` parts."""
        trained_in = min(server_round, self.num_rounds)
        parts = self.post.num_parts(trained_in, self.order(trained_in, limit)) - omitted
        numbers = range(self.first_delivery, self.first_delivery + parts)
        return [
            self.post.exchange("deliver", server_round, Order(rank_limit=limit), part=part)
            for part in numbers
        ]

    @property
    def brings_result(self) -> bool:
        """True if clients get the result."""
        return self.settings.evaluation.own_text

    def result_of(self, client: int) -> list[Exchange]:
        """Return the messages that push the full global adapters, if clients need them."""
        return self._result() if self.brings_result else []

    def _result(self) -> list[Exchange]:
        return self.adapters(self.num_rounds + 1, self.settings.lora.rank, omitted=0)


class HetLoRA(Tuning):
    """Messages of HetLoRA: each client has its own rank, which self-pruning may lower."""

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on: self-pruning, and ranks by capability."""
        job = settings.of(HetLoRASettings)
        open_ones = []
        if job.lowers_ranks and settings.federation.rounds > 2:
            open_ones.append("clients may give up ranks")
        if not job.ranks:
            open_ones.append("ranks follow the nodes' capability, which counts as equal here")
        return "; ".join(open_ones)

    def limit_of(self, client: int, server_round: int) -> int:
        """Return the rank of a client in a round.

        In the case of the least bytes, the client prunes its rank in every round except its first.
        """
        job = self.settings.of(HetLoRASettings)
        limit = super().limit_of(client, server_round)
        rounds = range(2, server_round) if self.case == "least" and job.lowers_ranks else ()
        for earlier in rounds:
            limit = kept_rank(limit, job.gamma) if client in self.drawn(earlier) else limit
        return limit


class SftP(Tuning):
    """Messages of SFT-P: a mask generator and LoRA; some clients join late.

    Each client writes its own model.
    """

    def seats_of_rounds(self) -> list[int]:
        """Return the clients that do not join late."""
        job = self.settings.of(SftPSettings)
        clients = self.settings.num_clients
        return [client for client in range(clients) if not job.is_late(client, clients)]

    @property
    def brings_result(self) -> bool:
        """True if clients get the result, which they need for their own models."""
        return self.asked or self.settings.job.makes_alone

    def alone_order(self, client: int) -> Alone | None:
        """Return the order to write a client's model, or to fit its embedding if it joined late."""
        job = self.settings.of(SftPSettings)
        rounds = range(1, self.num_rounds + 1)
        fits = not any(client in self.drawn(number) for number in rounds) and job.fits_alone(
            self.settings.federation
        )
        return Alone(fits=fits) if job.makes_alone and (job.keep_models or fits) else None
