"""Toy at the server: the average of the clients' vectors."""

import numpy as np

from strategies.base.inbox import Inbox
from strategies.cuts import Editing
from tests.toy_method.contract import EDITS


class Toy(Editing):
    """Federated averaging of one vector."""

    EDITS = EDITS

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the vectors."""
        vectors = [inbox.tensor(client, "vector", "mean").numpy() for client in clients]
        self.result.put("vector", {"mean": np.mean(vectors, axis=0, dtype=np.float32)})
