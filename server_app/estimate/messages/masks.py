"""Messages of FedPrLLM: masks go up, and decided masks down.

Decided masks are sent if clients pass their samples through pruned blocks, or evaluate them.
"""

from functools import cache
from typing import Any

from espalier.messages.message import NoScalars, Scalars
from espalier.methods.fedprllm.contract import Decision, decided_parts
from espalier.methods.fedprllm.settings import FedPrLLMSettings
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages


class Masks(Messages):
    """Messages of one round for all blocks, or of one round per block."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job = self.settings.of(FedPrLLMSettings)
        self._round = cache(self._messages_of)

    @property
    def num_rounds(self) -> int:
        """Number of rounds: one, or the number of blocks."""
        ends = self.job.last_rounds(
            self.settings.federation, lambda: len(self.model.plan.blocks), self.settings.num_clients
        )
        return ends[0]

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the messages of a round, which are the same for every client."""
        return self._round(server_round)

    def _messages_of(self, server_round: int) -> list[Exchange]:
        order: Scalars = NoScalars()
        if self.job.continue_behind == "scaled" and server_round > 1:
            order = Decision(num_voters=[self.settings.num_clients], decided=server_round - 1)
        return self.post.train(server_round, order)

    def result_of(self, client: int) -> list[Exchange]:
        """Return the pushed parts of all decided blocks."""
        return self._result() if self.settings.evaluation.own_text else []

    def _result(self) -> list[Exchange]:
        decided = len(self.model.plan.blocks)
        parts = decided_parts(self.model.plan, self.settings, decided)
        orders = [
            Decision(num_voters=[self.settings.num_clients] * len(part), decided=decided)
            for part in parts
        ]
        return [
            self.post.exchange("deliver", self.num_rounds, order, part=part)
            for part, order in enumerate(orders)
        ]
