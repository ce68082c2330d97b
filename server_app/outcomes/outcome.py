"""What every kind of result has done with it at the end of a run: written, checked, measured, and compared with baselines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import isfinite, isnan
from typing import Any, Generic, TypeVar

from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.modeling.block_stream import FLOAT16_REMEDY, BlockStream
from espalier.modeling.edits import Edits, dense
from espalier.modeling.opened import OpenedModel
from espalier.settings.methods import METHODS, part
from espalier.settings.mistakes import Mistake
from server_app.figures import figure
from server_app.public_tests import PublicTests
from server_app.results import Summary
from strategies.engine.run import Run

R = TypeVar("R")
T = TypeVar("T")

A_FEW = 2
"""Windows on which what was written is compared with what was meant."""

OneModel = Edits | OpenedModel
"""What is made of the base model's weights, or a model of its own."""
Model = OneModel | Mapping[int, OneModel]
"""One model for all, or one per client: a personal result."""


class Outcome(ABC, Generic[R]):
    """The end of one run.

    Parameters
    ----------
    run : settings, base model, computing and run folder
    tests : public texts and items, on which models are compared
    summary : gets the figures
    """

    def __init__(self, run: Run, tests: PublicTests, summary: Summary) -> None:
        self.run = run
        self.tests = tests
        self.summary = summary
        self.faults: list[str] = []
        """Figures of the result or the base that are not finite, a sentence each: the run is no success then."""

    MEASURED_BETWEEN_ROUNDS = False
    """Whether ``look`` can measure what the rounds have led to so far."""

    def look(self, result: R, clients: Sequence[int]) -> dict[str, Any]:
        """Figures of a result between rounds, JSON values: ``perplexity`` by text, or ``scores`` of the items by metric."""
        raise NotImplementedError

    @abstractmethod
    def write(self, result: R) -> None:
        """Write the result into the run directory, and check that it loads to the same.

        Raises
        ------
        ExportError
            It does not.
        Mistake
            The file system refused.
        """

    @abstractmethod
    def measure(self, result: R) -> None:
        """Compare the result with the dense model and, in a simulation, with what pooled data lead to."""

    def note_times(self, result: R) -> None:
        """Say what rounds took, where the method notes it; also of a run that failed."""
        return

    def take_clients_figures(self) -> None:
        """Say of which models the clients' figures are, where it is not what each would have got by itself."""
        return

    def pooled(self, make: Callable[[Any], T]) -> T | None:
        """The pooled-data baseline, by the function that the method's row names; ``make`` calls it.

        None where there is none, or it is not wanted, or a client's data cannot be read, which is no reason to fail.
        """
        run = self.run
        baseline = METHODS[self.run.settings.method].baseline
        if not (baseline and run.settings.makes_centralized(simulation=run.simulation)):
            return None
        try:
            return make(part(baseline))
        except Mistake as mistake:
            run.progress.note(
                "no_baseline", f"no centralized baseline: {mistake}", reason=str(mistake)
            )
            return None

    def measure_texts(self, models: Mapping[str, Model]) -> None:
        """Losses of models on the public texts, by column; of a personal result one per client."""
        run = self.run
        run.progress.begin("evaluating", len(models))
        for column, model in models.items():
            if isinstance(model, Mapping):
                self._measure_personal(column, model)
                continue
            losses = self.losses_of(model)
            self.note_not_finite(column, losses)
            for name, loss in losses.items():
                self.summary.losses[name][column] = loss
            text = ", ".join(f"{name} {figure(perplexity(loss))}" for name, loss in losses.items())
            run.progress.step("evaluated", f"{column}: {text}", column=column, losses=losses)

    def note_not_finite(self, column: str, figures: Mapping[str, float]) -> None:
        """Note losses or scores of a model that are NaN or infinite; those of a baseline do not make the run fail."""
        for name, value in figures.items():
            if isfinite(value):
                continue
            what = (
                f"the evaluation of the {column} model on {name} gives"
                f" {'NaN' if isnan(value) else 'infinity'}"
            )
            if column == "centralized":
                self.summary.notes.append(f"{what}; that figure is left out.")
            else:
                self.faults.append(what)

    def require_finite(self) -> None:
        """Refuse a result of which a figure is not finite; called when all is measured.

        Raises
        ------
        Mistake
            It names the models and texts, and what to set instead.
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
        raise Mistake(
            "; ".join([*self.faults, *(remedies or ["the result is no model that works"])])
        )

    def losses_of(self, model: OneModel) -> dict[str, float]:
        """A model's mean loss on each of the public texts."""
        if isinstance(model, OpenedModel):
            return mean_losses(BlockStream(model, self.run.computing), self.tests.texts, dense)
        return mean_losses(self._dense, self.tests.texts, model)

    @cached_property
    def _dense(self) -> BlockStream:
        return BlockStream(self.run.model, self.run.computing)

    def _measure_personal(self, column: str, models: Mapping[int, OneModel]) -> None:
        for client, model in sorted(models.items()):
            losses = self.losses_of(model)
            self.note_not_finite(f"{column} (client {client})", losses)
            for name, loss in losses.items():
                self.summary.personal.setdefault(column, {}).setdefault(name, {})[client] = (
                    perplexity(loss)
                )
            text = ", ".join(f"{name} {figure(perplexity(loss))}" for name, loss in losses.items())
            self.run.progress.step(
                "evaluated",
                f"{column} of client {client}: {text}",
                column=column,
                client=client,
                losses=losses,
            )


def perplexities(losses: Mapping[str, float]) -> dict[str, float | None]:
    """Of mean losses; None where one is no finite number."""
    return {
        name: value if isfinite(value := perplexity(loss)) else None
        for name, loss in losses.items()
    }
