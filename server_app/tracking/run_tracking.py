"""Tracking of one run: which figures are recorded when, and what happens if the tool fails."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

from espalier.errors import INTERRUPTS
from espalier.settings.run import of_the_result
from server_app.report.summary import COLUMNS, Summary
from server_app.tracking.tracker import Tracker, open_tracker
from strategies.base.run import Run

NONE = "none"
FEDERATED = "federated"


class RunTracking:
    """Figures of a run for the tool that ``tracking`` names.

    The tool gets figures after each round, evaluations between rounds, and the final figures. If it
    fails, the run says so once and goes on without it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tracker: Tracker | None = None
        if run.settings.tracking != NONE:
            self._guarded(self._open)
            run.progress.listeners.append(self._take)

    def _open(self) -> None:
        settings = self._run.settings
        parameters = of_the_result(settings.nested())
        self._tracker = open_tracker(settings.tracking, self._run.folder.path, parameters)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call the tool; an error is reported and turns the tracking off."""
        try:
            act()
        except INTERRUPTS:
            raise
        except BaseException as error:
            self._tracker = None
            tool = self._run.settings.tracking
            self._run.progress.note(
                "tracking_failed",
                f"tracking     {tool} is off, the run goes on: {type(error).__name__}: {error}",
            )

    def _take(self, event: str, details: Mapping[str, Any]) -> None:
        """Record what an event of the run brings, if it has figures."""
        # A checkpoint marks the end of a round.
        if event == "checkpoint":
            self._log(self._cost(), details["round"])
        elif event == "measured":
            task = self._run.settings.task.name
            self._log(dict(between_rounds(details, task)), details["round"])

    def _cost(self) -> dict[str, float]:
        traffic = self._run.folder.ledger.total()
        return {
            "seconds": self._run.seconds(),
            "bytes_up": traffic.up,
            "bytes_down": traffic.down,
            "clients": len(self._run.rounds.roster.active()),
        }

    def _log(self, figures: Mapping[str, float | None], step: int) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._guarded(lambda: tracker.log(known(figures), step))

    def finish(self, summary: Summary, *, completed: bool) -> None:
        """Record the figures of the summary and close the run in the tool."""
        tracker = self._tracker
        if tracker is None:
            return
        figures = known(self._cost() | final_figures(summary))
        self._guarded(lambda: tracker.finish(figures, summary.rounds, completed=completed))
        self._tracker = None


def between_rounds(details: Mapping[str, Any], task: str) -> Iterator[tuple[str, float | None]]:
    """Yield the figures of an evaluation between rounds by the names of the final figures.

    The figure of clients with models of their own is the mean over the clients.
    """
    for text, value in (details.get("perplexity") or {}).items():
        yield f"perplexity/{text}/{FEDERATED}", _mean(value)
    for metric, value in (details.get("scores") or {}).items():
        yield f"{metric}/{task}/{FEDERATED}", _mean(value)


def _mean(value: Any) -> float | None:
    """Return a number, or the mean of the numbers of clients; None if one is missing."""
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    if not values or None in values:
        return None
    return float(fmean(values))


def final_figures(summary: Summary) -> dict[str, float | None]:
    """Return quality by metric, dataset and row of the table, sizes, sparsity and times."""
    figures: dict[str, float | None] = {
        f"{metric.name}/{metric.dataset}/{column}": metric.value(column)
        for metric in summary.metrics()
        for column in COLUMNS
    }
    for column, size in summary.sizes.items():
        figures |= {
            f"parameters/{column}": size.parameters,
            f"bytes_on_disk/{column}": size.num_bytes,
        }
    if summary.zeroed:
        figures["sparsity"] = summary.sparsity
    return figures | {"seconds": summary.seconds, "virtual_seconds": summary.virtual_seconds}


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the finite figures as floats, under names that every tool accepts."""
    return {
        # Names are used in files and addresses.
        re.sub(r"[^\w ./-]", "_", name, flags=re.ASCII): float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
