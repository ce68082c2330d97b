"""Messages of the toy for ``espalier plan``.

Clients send one vector and receive the average if they evaluate it.
"""

from espalier.messages.message import NoScalars
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages


class ToyMessages(Messages):
    """Messages of the toy, equal for all clients in every round."""

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the exchanges of a round: an empty order and the vector."""
        return self.post.train(server_round, NoScalars())

    def result_of(self, client: int) -> list[Exchange]:
        """Return the exchange that pushes the average, if clients evaluate on their own text."""
        return (
            [self.post.exchange("deliver", self.num_rounds, NoScalars())]
            if self.settings.evaluation.own_text
            else []
        )
