"""Messages of FedSODA: the sub-model once, its emulator's LoRA after each alignment, adapters."""

from functools import cache
from typing import Any

from espalier.messages.blobs.model_pieces import Offer, Piece
from espalier.methods.fedpetuning.contract import Order, parts
from espalier.methods.fedsoda.contract import (
    EmulatorPart,
    SubModelOrder,
    emulator_adapters,
)
from espalier.methods.fedsoda.settings import FedSodaSettings
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from server_app.estimate.exchange import HASH, Exchange
from server_app.estimate.messages.adapters import Tuning
from server_app.estimate.sub_model import sub_model


class Emulated(Tuning):
    """Messages to clients that have no base model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.soda = self.settings.of(FedSodaSettings)
        self._held: dict[int, int] = {}
        self._offered, self._emulator = cache(self._offer), cache(self._bring_emulator)

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on: the nodes that already have the sub-model."""
        return (
            "nodes that hold the sub-model from an earlier run are not brought it; simulated ones"
            " share one place for it"
        )

    def plan_of_clients(self) -> ModelPlan:
        """Return the plan of the sub-model."""
        self.sub = sub_model(self.settings, self.model)
        return self.sub.model.plan

    def aligned_before(self, server_round: int) -> int:
        """Return the round before which the emulator was last aligned; 0 if it never was."""
        if not self.sub.aligned_blocks:
            return 0
        rounds = [number for number in range(1, server_round + 1) if self.soda.realigns_in(number)]
        return max([*rounds, *([1] if self.soda.pre_align_steps else [])], default=0)

    def order(self, server_round: int, limit: int) -> Order:
        """Return the fields of a ``train``, with the hash of the sub-model."""
        aligned = self.aligned_before(server_round)
        return SubModelOrder(rank_limit=limit, model_sha256=HASH, aligned=aligned)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the missing parts of the sub-model, then the adapter."""
        if server_round == 1:
            self._held.pop(client, None)
        if client not in self.drawn(server_round):
            return []
        return self._sub_model(client, server_round) + super().round_of(client, server_round)

    def result_of(self, client: int) -> list[Exchange]:
        """Return the sub-model, for clients that were not sampled recently, and the result."""
        brought = self._sub_model(client, self.num_rounds) if self.asked else []
        return brought + super().result_of(client)

    def _sub_model(self, client: int, server_round: int) -> list[Exchange]:
        found = list[Exchange]()
        aligned = self.aligned_before(server_round)
        if client not in self._held:
            found, self._held[client] = self._offered(server_round), 0
        if self._held[client] != aligned:
            found, self._held[client] = found + self._emulator(server_round, aligned), aligned
        return found

    def _offer(self, server_round: int) -> list[Exchange]:
        size = self.sub.num_bytes
        piece_bytes = self.settings.part_bytes
        sizes = [min(piece_bytes, size - start) for start in range(0, size, piece_bytes)]
        names = list(self.sub.files)
        offer = Offer(
            names=names, sizes=list(self.sub.files.values()), file_sha256=[HASH] * len(names), piece_bytes=piece_bytes,
            piece_sha256=[HASH] * len(sizes),
        )  # fmt: skip
        lacking = [] if self.case == "least" else list(range(len(sizes)))
        offered = self.post.exchange("deliver", server_round, offer, told={"pieces": lacking})
        pieces = [Piece(model_sha256=HASH, index=index, size=sizes[index]) for index in lacking]
        return [offered, *(self.post.exchange("deliver", server_round, piece) for piece in pieces)]

    def _bring_emulator(self, server_round: int, aligned: int) -> list[Exchange]:
        told = EmulatorPart(blocks=self.sub.aligned_blocks, aligned=aligned)
        number = len(
            parts(
                emulator_adapters(self.post.plan, self.settings, self.sub.aligned_blocks),
                self.settings,
            )
        )
        return [
            self.post.exchange("deliver", server_round, told, part=part) for part in range(number)
        ]
