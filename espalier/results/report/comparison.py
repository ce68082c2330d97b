"""Models that a run compares: dense, local baseline, centralized baseline and federated result."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from espalier.results.base_chain import read_chain, title_of
from espalier.results.figures import DENSE, PERPLEXITY, Quality, num_digits, qualities
from espalier.results.finished_run import FinishedRun
from espalier.results.intervals import mean_interval, wilson_interval
from espalier.results.model_chain import runs_behind
from espalier.settings.tables.evaluation import OWN_TEXT

COLUMNS = {
    "original": "original",
    "dense": "dense",
    "local_baseline": "local baseline",
    "centralized": "centralized",
    "federated": "federated",
}
"""Name in the report of each column of ``summary.json``.

``original`` is the model from which the first run of a chain started; it is not in the summary.
"""
PROPORTIONS = ("acc", "acc_norm", "exact_match")
"""Scores that are the fraction of items with a right answer."""
LARGEST_DRAWN = 1e100
NAMES = {
    "acc": "Accuracy",
    "acc_norm": "Accuracy (per character)",
    "exact_match": "Exact match",
    "loss": "Loss",
    "perplexity": "Perplexity",
}


OWN_NUMBERS = {"lora_rank": "LoRA rank", "virtual_seconds": "seconds of the fleet"}
"""Name of a client's own number, where it is not the key with blanks for underscores."""


def measure_title(key: str) -> str:
    """Return the name of a measure ``metric/dataset``, or of another number of a client."""
    metric, slash, dataset = key.partition("/")
    if not slash:
        return OWN_NUMBERS.get(key, key.replace("_", " "))
    where = "the clients' own text" if dataset == OWN_TEXT else dataset
    return f"{NAMES.get(metric, metric)} on {where}"


@dataclass(frozen=True)
class Value:
    """Value of one model, or the mean over clients that have a model each."""

    value: float
    clients: Mapping[int, float]
    """Values by client; empty if there is one model for all."""
    interval: tuple[float, float] | None = None
    """Interval of 95% confidence; None if it is unknown.

    It comes from the differences between clients, or from the number of items of a score.
    """


@dataclass(frozen=True)
class Comparison:
    """Values of all models by one measure, such as the perplexity on one text."""

    quality: Quality
    values: Mapping[str, Value]
    """Values by column; a model that was not evaluated has none."""
    names: Mapping[str, str]
    """Name of each column."""

    @property
    def title(self) -> str:
        """Name of the measure and of the text or task."""
        return measure_title(f"{self.quality.metric}/{self.quality.dataset}")

    @property
    def digits(self) -> int:
        """Number of decimal places of its values."""
        return num_digits(self.quality.metric)

    @property
    def change(self) -> float | None:
        """Value of the federated model minus that of the dense one; None if one is missing."""
        if not self.values.keys() >= {"dense", "federated"}:
            return None
        return self.values["federated"].value - self.values["dense"].value

    @property
    def is_drawable(self) -> bool:
        """True if a figure can show all values; a broken model has enormous perplexities."""
        values = [one for own in self.values.values() for one in (own.value, *own.clients.values())]
        return max(values) < LARGEST_DRAWN

    @property
    def is_relative(self) -> bool:
        """True if differences are shown in percent, as those of perplexities."""
        return self.quality.metric == PERPLEXITY

    @property
    def better_clients(self) -> tuple[int, int] | None:
        """Number of clients for which the federated model is better, and of those compared.

        None if the federated model does not have a value for each of several clients.
        """
        if not self.values.keys() >= {"dense", "federated"}:
            return None
        dense, federated = self.values["dense"], self.values["federated"].clients
        changes = [
            value - dense.clients.get(client, dense.value) for client, value in federated.items()
        ]
        lower = self.quality.lower_is_better
        better = sum(change < 0 if lower else change > 0 for change in changes)
        return (better, len(changes)) if len(changes) > 1 else None

    @property
    def is_better(self) -> bool | None:
        """True if the federated model is better than the dense one; None if they are equal."""
        if not self.change:
            return None
        return (self.change < 0) == self.quality.lower_is_better


def comparisons_of(run: FinishedRun) -> list[Comparison]:
    """Return the measures of a run that have at least one value, in the order of the summary."""
    first = first_run(run)
    found = [_comparison(run, quality, _original(first, quality)) for quality in qualities(run)]
    return [one for one in found if one.values]


def names_of(run: FinishedRun) -> dict[str, str]:
    """Return the name of each column; a base that another run made is not called dense."""
    return COLUMNS | {"dense": title_of(read_chain(run.summary.get("base", ())))}


def first_run(run: FinishedRun) -> FinishedRun | None:
    """Return the first run of the chain behind a result; None if there is no other run."""
    first = runs_behind(run)[0]
    return first if first.path != run.path else None


def _original(first: FinishedRun | None, quality: Quality) -> float | None:
    """Return the value of the original model by the same measure on the same samples."""
    if first is None or quality.sha256 is None:
        return None
    values = (
        one.values.get(DENSE)
        for one in qualities(first)
        if (one.key, one.sha256) == (quality.key, quality.sha256)
    )
    return next(values, None)


def _comparison(run: FinishedRun, quality: Quality, original: float | None) -> Comparison:
    items = (run.summary.get("test_items") or {}).get("number", 0)
    values = {}
    for column in COLUMNS:
        value = original if column == "original" else quality.values.get(column)
        if value is None:
            continue
        clients = _of_clients(run, quality, column) if column in quality.of_clients else {}
        values[column] = Value(value, clients, _interval(quality.metric, value, clients, items))
    return Comparison(quality, values, names_of(run))


def _interval(
    metric: str, value: float, clients: Mapping[int, float], items: int
) -> tuple[float, float] | None:
    is_proportion = metric in PROPORTIONS
    # A mean over clients is not a fraction of independent items.
    if clients:
        return mean_interval(list(clients.values()), 1.0 if is_proportion else inf)
    return wilson_interval(value, items) if is_proportion and items and value <= 1 else None


def _of_clients(run: FinishedRun, quality: Quality, column: str) -> dict[int, float]:
    """Return the clients' values, which ``summary.json`` has under one of two names."""
    name = f"{quality.metric}/{quality.dataset}"
    found = {}
    for client in run.summary["clients"]:
        # On its own text a client has a value of each model, otherwise of one.
        values = [client["metrics"].get(key) for key in (f"{name}/{column}", name)]
        known = [value for value in values if value is not None]
        if known:
            found[int(client["client"])] = float(known[0])
    return found
