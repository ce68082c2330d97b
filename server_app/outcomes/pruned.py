"""A pruned model and its masks: ``model/`` and ``masks.safetensors``."""

import shutil
from pathlib import Path
from typing import Protocol

from espalier.modeling.block_stream import BlockStream
from espalier.modeling.edits import Edits, PruneMasks
from espalier.settings.pruning import PruningSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.comparison_groups import pruned_in_matrix
from server_app.model_card import pruned_card
from server_app.outcomes.edited import EditedOutcome, EditedResult
from server_app.results import Summary, save_masks


class PrunedResult(EditedResult, Protocol):
    """A model that lacks weights."""

    @property
    def prune_masks(self) -> PruneMasks:
        """The prune masks of one block: bool, by canonical linear name."""

    def zeros_beyond_masks(self) -> int:
        """Weights that are zero though no mask prunes them."""

    def local_sparsity(self) -> float:
        """Share of the prunable weights that one client alone masks."""

    def centralized_sparsity(self) -> float:
        """Share of the prunable weights that one party masks which has all data."""


class PrunedOutcome(EditedOutcome[PrunedResult]):
    """Masks, the pruned model, and its losses."""

    def write(self, result: PrunedResult) -> None:
        """Masks and model; ``summary`` gets the sparsities."""
        run = self.run
        summary = self.summary
        summary.report = result.report()
        summary.zeroed = True
        summary.masked = save_masks(
            run.model, result.prune_masks, run.folder.path / "masks.safetensors"
        )
        summary.sparsity = summary.masked + result.zeros_beyond_masks() / run.model.plan.num_weights
        summary.local_sparsity = result.local_sparsity()
        summary.centralized_sparsity = result.centralized_sparsity()
        summary.notes = rounding_notes(summary)
        self.export(result.edits, pruned_card(run.settings, run.model, summary.sparsity))

    def measure(self, result: PrunedResult) -> None:
        """Losses on the texts; what the pooled-data baseline keeps of its blocks goes when it is measured."""
        super().measure(result)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def centralized(self) -> Edits | None:
        """What one party prunes that has everybody's windows."""
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
    """Why sparsities of the table are below the one that was asked for: every comparison group is rounded down by itself.

    One sentence for local models, one for the federated one; none where the table shows what was asked for.
    """
    job = summary.settings.of(PruningSettings)
    if job.pattern:
        return []
    plan = summary.model.plan
    method = summary.settings.method
    shapes = [linear.shape for block in plan.blocks for linear in block.linears]
    notes = []
    for who, shown, key, group in (
        (
            "local-only and centralized",
            summary.local_sparsity,
            "local-comparison-group",
            job.local_group,
        ),
        ("federated", summary.masked, "comparison-group", job.server_group),
    ):
        share = (
            sum(pruned_in_matrix(shape, job.sparsity, group) for shape in shapes) / plan.num_weights
        )
        if shown is not None and f"{share:.2%}" == f"{shown:.2%}" != f"{job.sparsity:.2%}":
            notes.append(
                f"{who}: {share:.2%}, not {job.sparsity:.2%}, as each {group} of a matrix loses"
                f" {job.sparsity:g} times its weights, rounded down ({method}.{key} = '{group}')"
            )
    return notes
