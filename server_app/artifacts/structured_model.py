"""Smaller model: ``model/`` in a form that other programs can read, its size, and its losses."""

from typing import Any, Protocol

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import best_form, check_structured, export_structured
from espalier.settings.structured import SmallerSettings
from server_app.artifacts.outcome import A_FEW, Model, Outcome
from server_app.report.model_card import smaller_card
from server_app.report.result_size import Size
from strategies.base.result import RunResult


class SmallerResult(RunResult, Protocol):
    """Result that consists of one smaller model."""

    @property
    def model(self) -> OpenedModel:
        """The smaller model."""


class StructuredOutcome(Outcome[SmallerResult]):
    """Smaller model, compared with its base."""

    def write(self, result: SmallerResult) -> None:
        """Export the model with a card, and check that it reloads to the same logits."""
        run = self.run
        target = self.run.folder.path / "model"
        small = result.model
        chosen = run.settings.of(SmallerSettings).form
        form = best_form(small) if chosen == "auto" else chosen
        size = {
            "form": form,
            "bytes": sum(stored.num_bytes for stored in small.checkpoint.tensors.values()),
        }
        self.summary.report = result.report() | size
        self.summary.zeroed = form == "zero-filled"
        self.summary.sparsity = 1 - small.plan.num_weights / run.model.plan.num_weights
        export_structured(
            small, dense, target, form, smaller_card(run.settings, run.model, self.summary.report)
        )
        windows = next(iter(self.tests.texts.values()))[:A_FEW]
        check_structured(BlockStream(small, run.computing), target, windows, form)
        run.progress.note(
            "exported", f"exported     model/ ({form}) reloads to the same logits", form=form
        )
        self.summary.where = f"the smaller model is in {target}"

    def measure(self, result: SmallerResult) -> None:
        """Compute losses on the texts."""
        models: dict[str, Model] = {"dense": dense, "federated": result.model}
        made: OpenedModel | None = self.pooled(self._made)
        if made is not None:
            models["centralized"] = made
            self.summary.sizes["centralized"] = Size(made.plan.num_parameters)
            self.summary.centralized_sparsity = (
                1 - made.plan.num_weights / self.run.model.plan.num_weights
            )
        self.measure_texts(models)

    def _made(self, baseline: Any) -> OpenedModel:
        made: OpenedModel = baseline(self.run)
        return made
