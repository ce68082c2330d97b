"""Base class of methods that edit weights by tensors: their result, and its way to the clients."""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from espalier.hf.stream.edits import BlobEdits, WeightEdit, edits_from
from espalier.messages.message import NoFields
from espalier.messages.tensor_blobs import pack_tensors
from strategies.base.evaluation import ClientEvaluation
from strategies.base.method import Method
from strategies.base.run import Run


class EditResult:
    """Tensors of a result, in the checkpoint's blobs, and the edits of weights by them."""

    def __init__(self, run: Run, edits: BlobEdits) -> None:
        self.settings = run.settings
        self.store = run.checkpoint.blobs
        self.functions = edits
        self.hashes: dict[str, str] = {}
        """Hash of each blob, by key."""

    def state(self) -> dict[str, Any]:
        """Return the hashes."""
        return {"hashes": self.hashes}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.hashes = state["hashes"]

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return list(self.hashes.values())

    def put(self, key: str, tensors: Mapping[str, NDArray]) -> None:
        """Store the tensors of a blob."""
        self.hashes[key] = self.store.put(pack_tensors(tensors))

    def blobs(self) -> dict[str, bytes]:
        """Return all blobs by key."""
        return {key: self.store.get(blob) for key, blob in self.hashes.items()}

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one block's weights."""
        return edits_from(self.functions, self.blobs(), self.settings)(index)

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``: none."""
        return {}


class Editing(Method):
    """Method whose result has the tensors of a client's reply; ``fold`` puts them into ``result``.

    The parameters are those of ``Method``.
    """

    EDITS: ClassVar[BlobEdits]
    """Edits of weights by the tensors of the result."""

    result: EditResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = EditResult(run, self.EDITS)

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients, part by part, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            blobs = self.result.blobs()
            parts = self.order(server_round, 0).parts
            whole = ((NoFields(), {key: blobs[key] for key in part}) for part in parts)
            self.rounds.push_parts(server_round, whole)
