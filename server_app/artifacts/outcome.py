"""Base class for the end of a run: its result is written, checked, evaluated and compared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite, isnan
from typing import Any, Generic, TypeVar

from torch import Tensor

from espalier.amounts import figure
from espalier.errors import EspalierError, InputError
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import FLOAT16_REMEDY, BlockStream
from espalier.hf.stream.edits import Edits, dense
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.results.base_chain import chain_of, title_of
from espalier.settings.registry import METHODS, part
from espalier.training.adapted_model import AdaptedModel
from server_app.artifacts.task_scores import chance, num_cut, scores_of
from server_app.public_tests import PublicTests
from server_app.report.summary import Summary
from strategies.base.run import Run

R = TypeVar("R")

A_FEW = 2
"""Number of sequences for a comparison."""

Model = Edits | OpenedModel
"""Edits of the base model's weights, or another model."""


class Outcome(ABC, Generic[R]):
    """End of one run.

    Parameters
    ----------
    run : settings, base model, device and run folder
    tests : evaluation texts and items for the comparison of models
    summary : receives the numbers
    """

    def __init__(self, run: Run, tests: PublicTests, summary: Summary) -> None:
        self.run = run
        self.tests = tests
        self.summary = summary
        self.faults: list[str] = []
        """Sentences about values of result or base that are not finite; the run then fails."""

    def intermediate_metrics(self, result: R, clients: Sequence[int]) -> dict[str, Any]:
        """Return metrics of an intermediate result between rounds, as JSON values.

        They are ``perplexity`` by text, or ``scores`` on the items by metric.
        """
        raise NotImplementedError

    @abstractmethod
    def write(self, result: R) -> None:
        """Write the result to the run directory, and check it by loading it.

        Raises
        ------
        ExportError
            The loaded result differs.
        InputError
            The file system refused.
        """

    @abstractmethod
    def measure(self, result: R) -> None:
        """Compare the result with the dense model and the centralized baseline.

        The baseline exists only in a simulation.
        """

    def note_times(self, result: R) -> None:
        """Record the times of rounds if the method has them, also for a failed run."""
        return

    def take_clients_figures(self) -> None:
        """Assign the clients' evaluation to the right model if it is not their local baseline."""
        return

    def pooled(self) -> Any:
        """Return the centralized baseline, by the function that the method's row names.

        The result is None if there is no baseline, if it is disabled, or if a client's data cannot
        be read, which must not make the run fail.
        """
        run = self.run
        baseline = METHODS[run.settings.method].baseline
        if not (baseline and run.settings.makes_centralized(simulation=run.simulation)):
            return None
        try:
            return part(baseline)(run)
        except EspalierError as error:
            run.progress.note("no_baseline", f"no centralized baseline: {error}", reason=str(error))
            return None

    def measure_texts(self, models: Mapping[str, Model]) -> None:
        """Compute losses of models on the evaluation texts, by column."""
        run = self.run
        run.progress.begin("evaluating", len(models))
        for column, model in models.items():
            losses = self.losses_of(model)
            self.note_not_finite(column, losses)
            for name, loss in losses.items():
                self.summary.losses[name][column] = loss
            text = f"{self._title(column)}: {in_words(losses)}"
            run.progress.step("evaluated", text, column=column, losses=losses)

    def measure_items(self, adapters: AdapterPlan, columns: Mapping[str, Tensors]) -> None:
        """Score the base model with each column's adapters on the task's items.

        A column without tensors is the base model itself. One base model is in memory, in the
        format of training (``training.base``).
        """
        run = self.run
        tests = self.tests
        summary = self.summary
        assert tests.encoded is not None
        number = len(tests.encoded)
        summary.tests = {"number": number, "cut": num_cut(run.settings, run.model, tests)}
        adapted = AdaptedModel.load(run.model, run.computing, run.settings, adapters)
        # The initial adapters leave the base unchanged, since B is zero.
        base = adapted.values()
        run.progress.begin("testing", len(columns))
        for column, tensors in columns.items():
            adapted.set(tensors or base)
            scores = scores_of(run, adapted, tests)
            self.note_not_finite(column, scores)
            for metric, value in scores.items():
                summary.scores.setdefault(metric, {})[column] = value
            text = ", ".join(f"{metric} {figure(value, 3)}" for metric, value in scores.items())
            text = f"{self._title(column)}: {text}"
            run.progress.step("tested", text, column=column, scores=scores)
        summary.chances = {metric: chance(run, tests, metric) for metric in summary.scores}

    def _title(self, column: str) -> str:
        """Return what a line of progress calls a model; a pruned base is not called dense."""
        return title_of(chain_of(self.run.model)) if column == "dense" else column

    def note_not_finite(self, column: str, figures: Mapping[str, float]) -> None:
        """Record values of a model that are NaN or infinite.

        Only values of a baseline do not make the run fail.
        """
        for name, value in figures.items():
            if isfinite(value):
                continue
            what = (
                f"the evaluation of the {self._title(column)} model on {name} gives"
                f" {'NaN' if isnan(value) else 'infinity'}"
            )
            if column == "centralized":
                self.summary.notes.append(f"{what}; this value is omitted.")
            else:
                self.faults.append(what)

    def require_finite(self) -> None:
        """Raise InputError if a value of the result is not finite. Called after the evaluation.

        Raises
        ------
        InputError
            The message names the models, the texts, and settings to change.
        """
        if not self.faults:
            return
        settings = self.run.settings
        remedies = []
        if settings.dtype == "float16":
            remedies.append(f"float16 overflows beyond 65504: {FLOAT16_REMEDY}")
        if settings.tunes:
            remedies.append(
                "training may have diverged: lower training.learning-rate ="
                f" {settings.training.learning_rate}"
            )
        raise InputError(
            "; ".join([*self.faults, *(remedies or ["the result is not a usable model"])])
        )

    def losses_of(self, model: Model) -> dict[str, float]:
        """Return a model's mean loss on each evaluation text."""
        if isinstance(model, OpenedModel):
            return mean_losses(BlockStream(model, self.run.computing), self.tests.texts, dense)
        return mean_losses(self.stream, self.tests.texts, model)

    @cached_property
    def stream(self) -> BlockStream:
        """Blocks of the base model."""
        return BlockStream(self.run.model, self.run.computing)

    @property
    def few_samples(self) -> Tensor:
        """Sequences for the comparison of the written model with the result."""
        return next(iter(self.tests.texts.values()))[:A_FEW]


def in_words(losses: Mapping[str, float]) -> str:
    """Return the perplexities for mean losses, as text."""
    return ", ".join(f"{name} {figure(perplexity(loss))}" for name, loss in losses.items())


def perplexities(losses: Mapping[str, float]) -> dict[str, float | None]:
    """Return the perplexities for mean losses; None for one that is not finite."""
    return {
        name: value if isfinite(value := perplexity(loss)) else None
        for name, loss in losses.items()
    }
