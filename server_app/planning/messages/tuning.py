"""Messages of the methods that average adapters: FedPETuning, HetLoRA, SFT-P."""

from functools import cache
from typing import Any

from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.hetlora import HetLoRASettings
from espalier.settings.run import RunSettings
from espalier.settings.sft_p import SftPSettings
from espalier.wire.alone import Alone
from espalier.wire.tuning import Order
from pruning_kernels.factor_ranks import kept_rank
from server_app.planning.exchange import Exchange
from server_app.planning.messages.base import Messages
from strategies.methods.drawn_clients import drawn


class Tuning(Messages):
    """Adapters go up, and from the second round on down."""

    first_delivery = 0
    """Number of the ``deliver`` of a round that brings the first part of the adapters."""

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
        """Clients from which a round's are drawn."""
        return list(range(self.settings.num_clients))

    def limit_of(self, client: int, server_round: int) -> int:
        """Rank limit of a client in a round."""
        return self.job.rank_limit_of(client, self.settings.lora)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """The adapters down, but for the first round, and up."""
        if client not in self.drawn(server_round):
            return []
        return self._alike(server_round, self.limit_of(client, server_round))

    def _round(self, server_round: int, limit: int) -> list[Exchange]:
        brought = self.adapters(server_round, limit, omitted=1) if server_round > 1 else []
        return brought + self.post.train(
            server_round, self.order(server_round, limit), {"rank_limit": limit, "rank": limit}
        )

    def order(self, server_round: int, limit: int) -> Order:
        """Scalars of a ``train``."""
        return Order(rank_limit=limit)

    def adapters(self, server_round: int, limit: int, omitted: int) -> list[Exchange]:
        """The global adapters on their way down, but for the last parts that are ``omitted``."""
        trained_in = min(server_round, self.num_rounds)
        parts = self.post.num_parts(trained_in, self.order(trained_in, limit)) - omitted
        numbers = range(self.first_delivery, self.first_delivery + parts)
        return [
            self.post.exchange("deliver", server_round, Order(rank_limit=limit), part=part)
            for part in numbers
        ]

    @property
    def brings_result(self) -> bool:
        """Whether clients get the result."""
        return self.settings.evaluation.own_text

    def result_of(self, client: int) -> list[Exchange]:
        """The whole of the global adapters, where clients need them."""
        return self._result() if self.brings_result else []

    def _result(self) -> list[Exchange]:
        return self.adapters(self.num_rounds + 1, self.settings.lora.largest_rank, omitted=0)


class HetLoRA(Tuning):
    """A rank per client; one that prunes its rank goes on with a lower one."""

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Self-pruning, and ranks by capability."""
        job = settings.of(HetLoRASettings)
        open_ones = []
        if job.self_pruning and settings.federation.rounds > 2:
            open_ones.append("clients may give up ranks")
        if not job.ranks:
            open_ones.append("ranks follow the nodes' capability, which counts as equal here")
        return "; ".join(open_ones)

    def limit_of(self, client: int, server_round: int) -> int:
        """The rank that it began with, or what is left if it gave some up in every round but its first."""
        job = self.settings.of(HetLoRASettings)
        limit = super().limit_of(client, server_round)
        rounds = range(2, server_round) if self.case == "least" and job.self_pruning else ()
        for earlier in rounds:
            limit = kept_rank(limit, job.gamma) if client in self.drawn(earlier) else limit
        return limit


class SftP(Tuning):
    """A generator of masks travels with LoRA; some clients join late, and each writes its own model."""

    def seats_of_rounds(self) -> list[int]:
        """Clients that are not late."""
        job = self.settings.of(SftPSettings)
        clients = self.settings.num_clients
        return [client for client in range(clients) if not job.is_late(client, clients)]

    @property
    def brings_result(self) -> bool:
        """Clients need it for their own models."""
        return self.asked or self.settings.job.makes_alone

    def alone_order(self, client: int) -> Alone | None:
        """To write its model, or to fit its embedding where no round drew it."""
        job = self.settings.of(SftPSettings)
        rounds = range(1, self.num_rounds + 1)
        fits = not any(client in self.drawn(number) for number in rounds) and job.fits_alone(
            self.settings.federation
        )
        return Alone(fits=fits) if job.makes_alone and (job.keep_models or fits) else None
