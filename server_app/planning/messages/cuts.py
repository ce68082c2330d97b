"""Messages of the methods that decide in one round what of a model goes: FLAP, LLM-Pruner, SliceGPT."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.settings.run import RunSettings
from espalier.wire import cuts, flap, slicegpt
from espalier.wire.messages import NoScalars
from espalier.wire.parts import parts_of
from espalier.wire.payload import TensorSpec, block_key
from espalier.wire.structure import units_of
from server_app.planning.exchange import Exchange
from server_app.planning.messages.base import Messages


class Cuts(Messages):
    """Every client is asked once, and brought the result where it evaluates that."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._round, self._result = cache(self._messages_of), cache(self._delivered)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Nothing down, and up what the method looks at."""
        return self._round(server_round)

    def _messages_of(self, server_round: int) -> list[Exchange]:
        return self.post.train(server_round, NoScalars())

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """The blobs of the result."""
        return cuts.cut_specs(self.model.plan, ())

    def result_of(self, client: int) -> list[Exchange]:
        """What is cut, part by part."""
        return self._result() if self.settings.evaluation.own_text else []

    def _delivered(self) -> list[Exchange]:
        parts = range(len(parts_of(self.result_specs(), self.settings.part_bytes)))
        return [
            self.post.exchange("deliver", self.num_rounds, NoScalars(), part=part) for part in parts
        ]


class CutsThatRescale(Cuts):
    """LLM-Pruner: with ``rescale`` a second round, whose requests say what is cut, and whose replies are of what stays."""

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Nothing without ``rescale``."""
        return "which units are cut" if settings.of(LlmPrunerSettings).rescaled else ""

    def _messages_of(self, server_round: int) -> list[Exchange]:
        if server_round == 1:
            return super()._messages_of(server_round)
        plan = self.model.plan
        along = dict[str, bytes]()
        for block in plan.blocks:
            units = units_of(plan, block)
            own = {
                kind: np.arange(number := getattr(units, kind)) < self._gone(number)
                for kind in cuts.KINDS
            }
            along[block_key(block.index)] = cuts.pack_cut(own, {})
        return self.post.train(server_round, NoScalars(), order_blobs=along, along=along)

    def _gone(self, number: int) -> int:
        """How many of so many units are cut: none, as then there are no equations, a share of them, or one."""
        share = self.settings.of(LlmPrunerSettings).share
        return {"least": 0, "usual": min(number - 1, max(1, round(share * number))), "most": 1}[
            self.case
        ]

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Bits and scales."""
        return cuts.cut_specs(self.model.plan, (), self.settings.of(LlmPrunerSettings).rescaled)


class CutsWithBiases(Cuts):
    """FLAP: biases take the place of what is cut."""

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """Bits and biases."""
        return cuts.cut_specs(self.model.plan, flap.biases(self.settings))


class Bases(Cuts):
    """SliceGPT: a basis for each norm."""

    def result_specs(self) -> Mapping[str, Mapping[str, TensorSpec]]:
        """One per place."""
        return slicegpt.basis_specs(self.model.plan, self.settings)
