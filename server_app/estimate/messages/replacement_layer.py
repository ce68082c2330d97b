"""Messages of LLM-Streamline: cosines in the first round, then a layer in both directions."""

from functools import cache
from typing import Any

from espalier.messages.message import NoScalars
from espalier.methods.llm_streamline.contract import Replace, layer_parts
from espalier.methods.llm_streamline.settings import LlmStreamlineSettings
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages

ANY = Replace(start=0)
"""Order with any start: all blocks of a model have the same shapes."""


class Layer(Messages):
    """Messages that are the same for all clients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._round, self._result = cache(self._messages_of), cache(self._delivered)

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the comparison of blocks, or the training of the layer.

        In the first round of training the layer is the base model's own block, which is not sent.
        """
        return self._round(server_round)

    def _messages_of(self, server_round: int) -> list[Exchange]:
        if server_round == 1:
            return self.post.train(server_round, NoScalars())
        before = range(self._num_parts() - 1) if server_round > 2 else range(0)
        brought = [self.post.exchange("deliver", server_round, ANY, part=part) for part in before]
        return brought + self.post.train(server_round, ANY, {"start": ANY.start})

    def result_of(self, client: int) -> list[Exchange]:
        """Return the layer, or the removed blocks if there is no replacement layer."""
        return self._result() if self.settings.evaluation.own_text else []

    def _delivered(self) -> list[Exchange]:
        trained = self.settings.of(LlmStreamlineSettings).replacement == "layer"
        parts = range(self._num_parts() if trained else 1)
        return [
            self.post.exchange("deliver", self.num_rounds + 1, ANY, part=part) for part in parts
        ]

    def _num_parts(self) -> int:
        return len(layer_parts(self.model.plan, self.settings, ANY.start))
