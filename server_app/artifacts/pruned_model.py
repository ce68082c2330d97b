"""Models whose weights a method changed or pruned (``model/``), compared with the dense model."""

import shutil
from collections.abc import Mapping
from typing import Protocol, TypeVar, cast

from torch import Tensor

from espalier.hf.export.model import check_export, export_edited
from espalier.hf.stream.edits import Edits, dense
from espalier.results.input_sums import write_sums
from espalier.settings.pruning import PruningSettings
from pruning_kernels.selection.comparison_groups import pruned_in_matrix
from pruning_kernels.votes.bitmask import Words
from server_app.artifacts.outcome import Outcome
from server_app.report.model_card import edited_card, pruned_card
from server_app.report.summary import Summary, save_masks
from strategies.base.method import RunResult
from strategies.baselines import SCRATCH


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
        target = run.folder.path / "model"
        export_edited(run.model, edits, target, card)
        check_export(self.stream, edits, target, self.few_samples)
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
        if (pooled := self.pooled()) is not None:
            models["centralized"] = pooled
        self.measure_texts(models)


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
        if run.settings.makes_centralized(simulation=run.simulation):
            summary.centralized_sparsity = result.centralized_sparsity()
        summary.notes = rounding_notes(summary)
        self.export(result.edits, pruned_card(run.settings, run.model, summary.sparsity))

    def measure(self, result: PrunedResult) -> None:
        """Compute losses on the texts, then delete the centralized baseline's temporary files."""
        super().measure(result)
        shutil.rmtree(self.run.folder.path / SCRATCH, ignore_errors=True)


class PooledResult(PrunedResult, Protocol):
    """Pruned model with the sums of squared inputs by which it was pruned."""

    counts: list[int]
    """Number of tokens or clients in the sums of each block."""

    def sums(self, index: int) -> Mapping[str, Tensor]:
        """Return the sums of a block, float64, by the first matrix of each input."""


class PooledOutcome(PrunedOutcome):
    """Masks, the pruned model, and the sums of squared inputs (``input-sums.safetensors``)."""

    def write(self, result: PrunedResult) -> None:
        """Write masks, model and sums."""
        super().write(result)
        run = self.run
        pooled = cast(PooledResult, result)
        tokens = run.settings.data.sequence_length
        write_sums(run.folder.path, run.model.plan, pooled.sums, pooled.counts, tokens)


def rounding_notes(summary: Summary) -> list[str]:
    """Return notes on sparsities below the requested one, which are due to rounding.

    The number of pruned weights is rounded down in every comparison group. There is one sentence
    for local models and one for the federated model. The list is empty if the table shows the
    requested sparsity.
    """
    job = summary.settings.of(PruningSettings)
    # A pattern has an exact sparsity.
    if job.pattern:
        return []
    plan = summary.model.plan
    notes = []
    baselines = {
        "local-baseline": summary.settings.evaluation.local_baseline,
        "centralized": summary.centralized_sparsity is not None,
    }
    for who, shown, group in (
        (
            " and ".join(name for name, is_made in baselines.items() if is_made),
            summary.local_sparsity if any(baselines.values()) else None,
            job.local_group,
        ),
        ("federated", summary.masked, job.server_group),
    ):
        share = (
            sum(pruned_in_matrix(shape, job.sparsity, group) for shape in plan.shapes)
            / plan.num_weights
        )
        if shown is not None and f"{share:.2%}" == f"{shown:.2%}" != f"{job.sparsity:.2%}":
            notes.append(
                # These formatted percentages are those of the table: compare what a reader sees.
                f"{who}: {share:.2%} instead of {job.sparsity:.2%}, because each {group} of a"
                f" matrix loses {job.sparsity:.2%} of its weights, rounded down"
            )
    return notes
