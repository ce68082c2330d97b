"""Strategy of the toy: the server averages the clients' vectors."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from espalier.hf.stream.edits import WeightEdit
from espalier.messages.message import NoScalars
from espalier.messages.payload import pack_tensors
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords
from strategies.base.run import Run
from toy_method.model import scaled
from toy_method.settings import ToySettings


class ToyResult:
    """Result of the toy: the average vector."""

    def __init__(self, settings: RunSettings, store: BlobStore) -> None:
        self.strength = settings.of(ToySettings).strength
        self.store = store
        self.blob = ""

    def state(self) -> dict[str, Any]:
        return {"blob": self.blob}

    def restore(self, state: dict[str, Any]) -> None:
        self.blob = state["blob"]

    def stored(self) -> Collection[str]:
        return [self.blob] if self.blob else []

    def report(self) -> dict[str, Any]:
        return {}

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        return scaled(self.store.get(self.blob), self.strength)(index)


class Toy(Method):
    """Federated averaging of one vector."""

    WORDS = ProgressWords("vectors", "vectors", "vector")
    result: ToyResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = ToyResult(run.settings, run.checkpoint.blobs)

    def summary(self) -> None:
        self.run.progress.note("method", "toy          the mean of a vector")

    def order(self, server_round: int, client: int) -> ClientOrder:
        return ClientOrder(NoScalars(), parts=[["vector"]])

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        vectors = [inbox.tensor(client, "vector", "mean").numpy() for client in clients]
        self.result.blob = self.result.store.put(
            pack_tensors({"mean": np.mean(vectors, axis=0, dtype=np.float32)})
        )

    def deliver(self, server_round: int) -> None:
        if self.run.settings.evaluation.own_text:
            blobs = {"vector": self.result.store.get(self.result.blob)}
            self.rounds.push_parts(server_round, [(NoScalars(), blobs)])
