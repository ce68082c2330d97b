"""Smaller models (``model/``): their form on disk, their size, and comparisons."""

import math
from pathlib import Path
from typing import Protocol

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.rotated_checkpoint import SHORTCUTS
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from espalier.hf.structured.export import (
    Form,
    best_form,
    check_structured,
    export_structured,
    zero_biases,
)
from espalier.results.figures import Size
from espalier.settings.pruning import SmallerSettings
from server_app.artifacts.outcome import Model, Outcome
from server_app.report.model_card import smaller_card
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

    def _form(self, small: OpenedModel) -> Form:
        chosen = self.run.settings.of(SmallerSettings).form
        return best_form(small) if chosen == "auto" else chosen

    def _export(self, small: OpenedModel, form: Form, card: str) -> None:
        export_structured(small, dense, self._target, form, card)

    def _federated(self, result: SmallerResult) -> OpenedModel:
        """Return the model to evaluate."""
        return result.model

    def _weights(self, small: OpenedModel) -> int:
        """Return the number of weights of the blocks' matrices."""
        return small.plan.num_weights

    def _sparsity(self, small: OpenedModel) -> float:
        """Return the fraction of the base's block weights that is removed."""
        return 1 - self._weights(small) / self.run.model.plan.num_weights

    def write(self, result: SmallerResult) -> None:
        """Export the model with a card, and check that it reloads to the same logits."""
        run = self.run
        small = result.model
        form = self._form(small)
        zeros = {} if form == "zero-filled" else zero_biases(small)
        # A key of the configuration adds biases to more matrices than need one.
        parameters = small.plan.num_parameters + sum(
            math.prod(bias.shape) for bias in zeros.values()
        )
        tensors = (*small.checkpoint.tensors.values(), *zeros.values())
        size = {
            "form": form,
            "parameters": parameters,
            "remaining_fraction": parameters / run.model.plan.num_parameters,
            "bytes": sum(stored.num_bytes for stored in tensors),
        }
        self.summary.report = result.report() | size
        self.summary.zeroed = form == "zero-filled"
        self.summary.sparsity = self._sparsity(small)
        self._export(small, form, smaller_card(run.settings, run.model, self.summary.report))
        stream = BlockStream(small, run.computing)
        check_structured(stream, self._target, self.few_samples, form)
        run.progress.note(
            "exported", f"exported     model/ ({form}) reloads to the same logits", form=form
        )
        self.summary.where = f"the model is in {self._target}"

    def measure(self, result: SmallerResult) -> None:
        """Compute losses on the texts."""
        models: dict[str, Model] = {"dense": dense, "federated": self._federated(result)}
        made: OpenedModel | None = self.pooled()
        if made is not None:
            models["centralized"] = made
            self.summary.sizes["centralized"] = Size(made.plan.num_parameters)
            self.summary.centralized_sparsity = self._sparsity(made)
        self.measure_texts(models)


class SlicedOutcome(StructuredOutcome):
    """Sliced model, compared with its base."""

    def _form(self, small: OpenedModel) -> Form:
        return "compact"

    def _export(self, small: OpenedModel, form: Form, card: str) -> None:
        export_sliced(small, self._target, card)

    def _federated(self, result: SmallerResult) -> OpenedModel:
        # The written model need not be rotated again when it is read.
        return OpenedModel(self._target)

    def _weights(self, small: OpenedModel) -> int:
        """Return the number of weights of the blocks, with those of the shortcuts."""
        shortcuts = sum(
            shape[0] * shape[1]
            for block in small.plan.blocks
            for name, shape in block.others
            if name.removesuffix(".weight") in SHORTCUTS
        )
        return super()._weights(small) + shortcuts
