"""Messages of the toy, for ``espalier plan``: a vector up, and the average down where clients evaluate it."""

from espalier.wire.messages import NoScalars
from server_app.planning.exchange import Exchange
from server_app.planning.messages.base import Messages


class ToyMessages(Messages):
    """All clients are asked for the same in every round."""

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Nothing down but an order."""
        return self.post.train(server_round, NoScalars())

    def result_of(self, client: int) -> list[Exchange]:
        """The average."""
        return (
            [self.post.exchange("deliver", self.num_rounds, NoScalars())]
            if self.settings.evaluation.own_text
            else []
        )
