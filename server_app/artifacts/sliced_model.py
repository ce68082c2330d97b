"""Sliced model (SliceGPT): ``model/`` with the code that builds it, its size, and its losses."""

from pathlib import Path
from typing import Any

from espalier.hf.export.model import check_export
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.rotated_checkpoint import SHORTCUTS
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import dense
from server_app.artifacts.outcome import A_FEW, Model, Outcome
from server_app.report.model_card import smaller_card
from server_app.report.result_size import Size
from strategies.slicegpt.bases import SlicedResult


class SlicedOutcome(Outcome[SlicedResult]):
    """Sliced model, compared with its base."""

    @property
    def _target(self) -> Path:
        return self.run.folder.path / "model"

    def write(self, result: SlicedResult) -> None:
        """Export the model with a card, and check that it reloads to the same logits."""
        run = self.run
        small = result.model
        size = {
            "form": "compact",
            "bytes": sum(stored.num_bytes for stored in small.checkpoint.tensors.values()),
        }
        self.summary.report = result.report() | size
        self.summary.sparsity = self._fewer(small)
        export_sliced(
            small, self._target, smaller_card(run.settings, run.model, self.summary.report)
        )
        windows = next(iter(self.tests.texts.values()))[:A_FEW]
        check_export(BlockStream(small, run.computing), dense, self._target, windows)
        run.progress.note("exported", "exported     model/ reloads to the same logits")
        self.summary.where = f"the sliced model is in {self._target}"

    def measure(self, result: SlicedResult) -> None:
        """Compute losses on the texts with the written model."""
        models: dict[str, Model] = {"dense": dense, "federated": OpenedModel(self._target)}
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
