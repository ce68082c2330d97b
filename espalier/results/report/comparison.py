"""Models that a run compares: dense, local baseline, centralized baseline and federated result."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

from espalier.results.finished_run import FinishedRun
from espalier.settings.tables.evaluation import OWN_TEXT

COLUMNS = {
    "dense": "dense",
    "local_baseline": "local baseline",
    "centralized": "centralized",
    "federated": "federated",
}
"""Name in the report of each column of ``summary.json``."""
PROPORTIONS = ("acc", "acc_norm", "exact_match")
"""Scores that are the fraction of items with a right answer."""
CONFIDENCE = 0.95
NAMES = {
    "acc": "Accuracy",
    "acc_norm": "Accuracy (per character)",
    "exact_match": "Exact match",
    "loss": "Loss",
    "perplexity": "Perplexity",
}


@dataclass(frozen=True)
class Value:
    """Value of one model, or the mean over clients that have a model each."""

    column: str
    value: float
    clients: Mapping[int, float]
    """Values by client; empty if there is one model for all."""
    interval: tuple[float, float] | None = None
    """Interval of 95% confidence that comes from the number of items; None if it is unknown."""

    @property
    def name(self) -> str:
        """Name of the model in the report."""
        return COLUMNS[self.column]

    @property
    def spread(self) -> tuple[float, float] | None:
        """Smallest and largest value of the clients; None if there are fewer than two."""
        values = self.clients.values()
        return (min(values), max(values)) if len(values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """Values of all models by one measure, such as the perplexity on one text."""

    measure: str
    dataset: str
    lower_is_better: bool
    values: Mapping[str, Value]
    """Values by column; a model that was not evaluated has none."""
    chance: float | None = None

    @property
    def title(self) -> str:
        """Name of the measure and of the text or task."""
        where = "the clients' own text" if self.dataset == OWN_TEXT else self.dataset
        return f"{NAMES.get(self.measure, self.measure)} on {where}"

    @property
    def digits(self) -> int:
        """Number of decimal places of its values."""
        return 2 if self.measure == "perplexity" else 3

    @property
    def change(self) -> float | None:
        """Value of the federated model minus that of the dense one; None if one is missing."""
        if not self.values.keys() >= {"dense", "federated"}:
            return None
        return self.values["federated"].value - self.values["dense"].value

    @property
    def is_better(self) -> bool | None:
        """True if the federated model is better than the dense one; None if they are equal."""
        if not self.change:
            return None
        return (self.change < 0) == self.lower_is_better


def comparisons_of(run: FinishedRun) -> list[Comparison]:
    """Return the measures of a run that have at least one value, in the order of the summary."""
    found = [_comparison(run, entry) for entry in run.summary.get("metrics") or ()]
    return [one for one in found if one.values]


def _comparison(run: FinishedRun, entry: Mapping[str, Any]) -> Comparison:
    measure = str(entry["name"])
    dataset = str(entry["dataset"])
    of_clients = entry.get("medians_of_clients") or {}
    items = (run.summary.get("test_items") or {}).get("number", 0)
    values = {}
    for column in COLUMNS:
        value = entry["values"].get(column)
        if value is None:
            continue
        clients = _of_clients(run, measure, dataset, column) if column in of_clients else {}
        has_interval = measure in PROPORTIONS and items and not clients
        interval = wilson_interval(value, items) if has_interval else None
        values[column] = Value(column, float(value), clients, interval)
    return Comparison(measure, dataset, entry["direction"] == "lower", values, entry.get("chance"))


def _of_clients(run: FinishedRun, measure: str, dataset: str, column: str) -> dict[int, float]:
    """Return the clients' values, which ``summary.json`` has under one of two names."""
    names = (f"{measure}/{dataset}/{column}", f"{measure}/{dataset}")
    found = {}
    for client in run.summary["clients"]:
        values = [client["metrics"].get(name) for name in names]
        known = [value for value in values if value is not None]
        if known:
            found[int(client["client"])] = float(known[0])
    return found


def wilson_interval(fraction: float, number: int) -> tuple[float, float]:
    """Return the Wilson interval of a fraction of ``number`` items, at ``CONFIDENCE``.

    Source: E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference,
    JASA 22 (1927).
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = fraction + z * z / (2 * number)
    half = z * sqrt(fraction * (1 - fraction) / number + z * z / (4 * number * number))
    scale = 1 + z * z / number
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
