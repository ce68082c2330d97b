"""Messages of the methods that cut a model after one round: FLAP, LLM-Pruner, SliceGPT."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from espalier.messages.blobs import cuts
from espalier.messages.message import NoScalars
from espalier.messages.parts import parts_of
from espalier.messages.payload import TensorSpec
from espalier.methods.flap import contract as flap
from espalier.methods.llm_pruner.settings import LlmPrunerSettings
from espalier.methods.slicegpt import contract as slicegpt
from espalier.models.groups import Groups
from espalier.models.plan import block_key
from espalier.settings.run import RunSettings
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages


class Cuts(Messages):
    """Messages of a method that asks every client once, and pushes the result for evaluation."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._round, self._result = cache(self._messages_of), cache(self._delivered)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return an empty request, and a reply with the method's statistics."""
        return self._round(server_round)

    def _messages_of(self, server_round: int) -> list[Exchange]:
        return self.post.train(server_round, NoScalars())

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Return the specs of the result's blobs."""
        return cuts.cut_specs(self.model.plan, ())

    def result_of(self, client: int) -> list[Exchange]:
        """Return the pushed parts of the cut."""
        return self._result() if self.settings.evaluation.own_text else []

    def _delivered(self) -> list[Exchange]:
        parts = range(len(parts_of(self.result_specs(), self.settings.part_bytes)))
        return [
            self.post.exchange("deliver", self.num_rounds, NoScalars(), part=part) for part in parts
        ]


class CutsThatRescale(Cuts):
    """Messages of LLM-Pruner.

    With ``rescale`` there is a second round. Its requests contain the cut, and its replies the
    statistics of the remaining groups.
    """

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on; empty without ``rescale``."""
        return "which groups are cut" if settings.of(LlmPrunerSettings).rescaled else ""

    def _messages_of(self, server_round: int) -> list[Exchange]:
        if server_round == 1:
            return super()._messages_of(server_round)
        groups = Groups.of(self.model.plan)
        cut = groups.none
        for pool, count in enumerate(groups.counts.tolist()):
            cut[groups.span(range(pool, pool + 1))][: self._gone(count)] = True
        along = {
            block_key(block.index): cuts.pack_cut(groups, cut, block.index)
            for block in self.model.plan.blocks
        }
        return self.post.train(server_round, NoScalars(), order_blobs=along, along=along)

    def _gone(self, number: int) -> int:
        """Return the number of groups that are cut.

        The least bytes come from none, because then there are no equations. The usual number
        follows from the pruning ratio. The most bytes come from a cut of one group.
        """
        share = self.settings.of(LlmPrunerSettings).share
        return {"least": 0, "usual": min(number - 1, max(1, round(share * number))), "most": 1}[
            self.case
        ]

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Return the specs of bit masks and scales."""
        return cuts.cut_specs(self.model.plan, (), self.settings.of(LlmPrunerSettings).rescaled)


class CutsWithBiases(Cuts):
    """Messages of FLAP, whose biases compensate for the cut."""

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Return the specs of bit masks and biases."""
        return cuts.cut_specs(self.model.plan, flap.biases(self.settings))


class Bases(Cuts):
    """Messages of SliceGPT, with one basis for each norm."""

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Return the specs of one basis per norm."""
        return slicegpt.basis_specs(self.model.plan, self.settings)
