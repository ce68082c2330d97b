"""Messages of the methods that decide in one round what of a model goes: FLAP, LLM-Pruner, SliceGPT."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from espalier.wire import cuts, flap, slicegpt
from espalier.wire.messages import NoScalars
from espalier.wire.parts import parts_of
from espalier.wire.payload import TensorSpec
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
        return [self.post.exchange("deliver", self.num_rounds, NoScalars(), part=part) for part in parts]


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
