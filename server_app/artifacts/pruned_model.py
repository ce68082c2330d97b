"""Pruned model and its masks: ``model/`` and ``masks.safetensors``."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.settings.pruning import PruningSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.comparison_groups import pruned_in_matrix
from pruning_kernels.votes.bitmask import Words
from server_app.artifacts.edited_model import EditedOutcome, EditedResult
from server_app.report.model_card import pruned_card
from server_app.report.summary import Summary, save_masks


class PrunedResult(EditedResult, Protocol):
    """Result that consists of one pruned model."""

    def packed_masks(self, index: int) -> Mapping[str, Words]:
        """Return the packed prune masks of one block by canonical linear name."""

    def zeros_beyond_masks(self) -> int:
        """Return the number of weights that are zero although no mask prunes them."""

    def local_sparsity(self) -> float:
        """Return the sparsity of a local baseline, as a fraction of prunable weights."""

    def centralized_sparsity(self) -> float:
        """Return the sparsity of the centralized baseline, as a fraction of prunable weights."""


class PrunedOutcome(EditedOutcome[PrunedResult]):
    """Masks, the pruned model, and its losses."""

    def write(self, result: PrunedResult) -> None:
        """Write masks and model, and record the sparsities in ``summary``."""
        run = self.run
        summary = self.summary
        summary.report = result.report()
        summary.zeroed = True
        summary.masked = save_masks(
            run.model, result.packed_masks, run.folder.path / "masks.safetensors"
        )
        summary.sparsity = summary.masked + result.zeros_beyond_masks() / run.model.plan.num_weights
        summary.local_sparsity = result.local_sparsity()
        summary.centralized_sparsity = result.centralized_sparsity()
        summary.notes = rounding_notes(summary)
        self.export(result.edits, pruned_card(run.settings, run.model, summary.sparsity))

    def measure(self, result: PrunedResult) -> None:
        """Compute losses on the texts, then delete the centralized baseline's temporary files."""
        super().measure(result)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def centralized(self) -> Edits | None:
        """Return the edits of the model pruned with the calibration samples of all clients."""
        run = self.run
        made: Edits | None = self.pooled(
            lambda baseline: baseline(
                run, BlockStream(run.model, run.computing), BlobStore(self._scratch)
            )
        )
        return made

    @property
    def _scratch(self) -> Path:
        return self.run.folder.path / "centralized"


def rounding_notes(summary: Summary) -> list[str]:
    """Return notes on sparsities below the requested one, which are due to rounding.

    The number of pruned weights is rounded down in every comparison group. There is one sentence
    for local models and one for the federated model. The list is empty if the table shows the
    requested sparsity.
    """
    job = summary.settings.of(PruningSettings)
    if job.pattern:
        return []
    plan = summary.model.plan
    shapes = [linear.shape for block in plan.blocks for linear in block.linears]
    notes = []
    for who, shown, group in (
        ("local-baseline and centralized", summary.local_sparsity, job.local_group),
        ("federated", summary.masked, job.server_group),
    ):
        share = (
            sum(pruned_in_matrix(shape, job.sparsity, group) for shape in shapes) / plan.num_weights
        )
        if shown is not None and f"{share:.2%}" == f"{shown:.2%}" != f"{job.sparsity:.2%}":
            notes.append(
                # These formatted percentages are those of the table: compare what a reader sees.
                f"{who}: {share:.2%} instead of {job.sparsity:.2%}, because each {group} of a"
                f" matrix loses {job.sparsity:.2%} of its weights, rounded down"
            )
    return notes
