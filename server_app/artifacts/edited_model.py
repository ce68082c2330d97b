"""Model whose weights the method changed (``model/``), compared with the dense model on texts."""

from typing import Protocol, TypeVar

from espalier.hf.export.model import check_export, export_edited
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, dense
from server_app.artifacts.outcome import A_FEW, Outcome
from server_app.report.model_card import edited_card
from strategies.base.method import RunResult


class EditedResult(RunResult, Protocol):
    """Result that consists of one model."""

    @property
    def edits(self) -> Edits:
        """Edits that turn the dense weights of one block into those of the result."""


E = TypeVar("E", bound=EditedResult)


class EditedOutcome(Outcome[E]):
    """Changed model and its losses."""

    def write(self, result: E) -> None:
        """Export the model with a card, and check that it reloads to the same logits."""
        self.summary.report = result.report()
        self.export(result.edits, edited_card(self.run.settings, self.run.model))

    def export(self, edits: Edits, card: str) -> None:
        """Write ``model/`` and check it by reloading it."""
        run = self.run
        target = self.run.folder.path / "model"
        stream = BlockStream(run.model, run.computing)
        samples = next(iter(self.tests.texts.values()))[:A_FEW]
        export_edited(run.model, edits, target, card)
        check_export(stream, edits, target, samples)
        run.progress.note(
            "exported",
            "exported     model/ reloads to the same logits",
            sparsity=self.summary.sparsity,
        )
        self.summary.where = (
            f"the {'model' if self.summary.sparsity is None else 'pruned model'} is in {target}"
        )

    def measure(self, result: E) -> None:
        """Compute losses on the texts."""
        models: dict[str, Edits] = {"dense": dense, "federated": result.edits}
        if (pooled := self.centralized()) is not None:
            models["centralized"] = pooled
        self.measure_texts(models)

    def centralized(self) -> Edits | None:
        """Return the edits of the centralized baseline; None if it is disabled."""
        made: Edits | None = self.pooled(
            lambda baseline: baseline(self.run, BlockStream(self.run.model, self.run.computing))
        )
        return made
