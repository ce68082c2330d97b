"""Smaller model: ``model/`` with its code or in a form for other programs, its size and losses."""

from pathlib import Path
from typing import Any, Protocol

from espalier.hf.export.model import check_export
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.opened_sliced import SlicedModel
from espalier.hf.sliced.rotated_checkpoint import SHORTCUTS
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import Form, best_form, check_structured, export_structured
from espalier.settings.structured import SmallerSettings
from server_app.artifacts.outcome import A_FEW, Model, Outcome
from server_app.report.model_card import smaller_card
from server_app.report.result_size import Size
from strategies.base.method import RunResult


class SmallerResult(RunResult, Protocol):
    """Result that consists of one smaller model."""

    @property
    def model(self) -> OpenedModel:
        """The smaller model."""


class StructuredOutcome(Outcome[SmallerResult]):
    """Smaller model, compared with its base."""

    @property
    def _target(self) -> Path:
        return self.run.folder.path / "model"

    def write(self, result: SmallerResult) -> None:
        """Export the model with a card, and check that it reloads to the same logits."""
        run = self.run
        small = result.model
        form = self._form(small)
        size = sum(stored.num_bytes for stored in small.checkpoint.tensors.values())
        self.summary.report = result.report() | {"form": form, "bytes": size}
        self.summary.zeroed = form == "zero-filled"
        self.summary.sparsity = self._fewer(small)
        card = smaller_card(run.settings, run.model, self.summary.report)
        stream = BlockStream(small, run.computing)
        windows = next(iter(self.tests.texts.values()))[:A_FEW]
        how = run.settings.export_check
        if isinstance(small, SlicedModel):
            export_sliced(small, self._target, card)
            check_export(stream, dense, self._target, windows, how)
        else:
            export_structured(small, dense, self._target, form, card)
            check_structured(stream, self._target, windows, form, how)
        text = f"exported     model/ ({form}) reloads to the same logits"
        run.progress.note("exported", text, form=form)
        self.summary.where = f"the smaller model is in {self._target}"

    def _form(self, small: OpenedModel) -> Form:
        """Return the form in which the model is written; sliced models bring their own code."""
        if isinstance(small, SlicedModel):
            return "compact"
        chosen = self.run.settings.of(SmallerSettings).form
        return best_form(small) if chosen == "auto" else chosen

    def measure(self, result: SmallerResult) -> None:
        """Compute losses on the texts."""
        small = result.model
        # Each reading of a sliced model's tensors computes them, so the written ones are used.
        federated = OpenedModel(self._target) if isinstance(small, SlicedModel) else small
        models: dict[str, Model] = {"dense": dense, "federated": federated}
        made: OpenedModel | None = self.pooled(self._made)
        if made is not None:
            models["centralized"] = made
            self.summary.sizes["centralized"] = Size(made.plan.num_parameters)
            self.summary.centralized_sparsity = self._fewer(made)
        self.measure_texts(models)

    def _made(self, baseline: Any) -> OpenedModel:
        made: OpenedModel = baseline(self.run)
        return made

    def _fewer(self, small: OpenedModel) -> float:
        """Return the fraction of the base's block weights that is removed, net of shortcuts."""
        shortcuts = sum(
            shape[0] * shape[1]
            for block in small.plan.blocks
            for name, shape in block.others
            if name.removesuffix(".weight") in SHORTCUTS
        )
        return 1 - (small.plan.num_weights + shortcuts) / self.run.model.plan.num_weights
