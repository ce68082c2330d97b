"""Quality, size and cost of a run, as ``summary.json`` has them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from espalier.amounts import figure, size
from espalier.results.finished_run import ADAPTER, FinishedRun

FEDERATED = "federated"
DENSE = "dense"
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Quality:
    """One measure of the models of a run on one dataset."""

    metric: str
    dataset: str
    lower_is_better: bool
    values: Mapping[str, float | None]
    """Value by row of the result table (``dense``, ``federated``, ...)."""
    sha256: str | None = None
    """Hash of the tokens on which the models were evaluated; None if they are the clients' own."""
    chance: float | None = None
    """Score of random answers; None if there is none."""
    of_clients: Collection[str] = ()
    """Rows whose value is a mean over clients."""

    @property
    def title(self) -> str:
        """Name for a table: ``wiki perplexity``."""
        return f"{self.dataset} {self.metric}"

    @property
    def rank(self) -> int:
        """Rank by which a run is judged: scores, then losses, then perplexities."""
        if not self.lower_is_better:
            return 0
        return 2 if self.metric == PERPLEXITY else 1

    @property
    def key(self) -> tuple[str, str]:
        """Dataset and metric, which identify the measure in a run."""
        return self.dataset, self.metric


def figure_text(metric: str, value: float | None) -> str:
    """Return a value of a metric for a table; a dash for None."""
    return figure(value, num_digits(metric))


def num_digits(metric: str) -> int:
    """Return the number of decimal places with which values of a metric are shown."""
    return 2 if metric == PERPLEXITY else 3


@dataclass(frozen=True)
class Size:
    """Size of a model, or of an adapter for one; numbers are None if they are unknown."""

    parameters: float | None = None
    num_bytes: float | None = None
    """Bytes of its safetensors files; None also if none were written."""
    folder: str = ""
    """Folder of the files in the run directory, or empty; the size of ``clients`` is a mean."""

    @property
    def is_adapter(self) -> bool:
        """True if the size is that of an adapter."""
        return self.folder == ADAPTER

    def with_base(self, base: "Size") -> "Size":
        """Return the size of what is loaded for use: an adapter together with its base model."""
        if not self.is_adapter:
            return self
        return Size(_sum(self.parameters, base.parameters), _sum(self.num_bytes, base.num_bytes))

    def in_words(self, original: float | None = None) -> tuple[str, str]:
        """Return parameters and bytes for a table; those of an adapter have a plus sign.

        Parameters
        ----------
        original : parameters of the model before pruning; if a model has fewer or more, its
            percentage of them follows
        """
        sign = "+" if self.is_adapter else ""
        num_bytes = "-" if self.num_bytes is None else f"{sign}{size(self.num_bytes)}"
        if self.parameters is None:
            return "-", num_bytes
        parameters = f"{sign}{self.parameters:,.0f}"
        # An adapter has no percentage: it does not replace the original model.
        if original and not self.is_adapter and self.parameters != original:
            parameters += f" ({self.parameters / original:.1%})"
        return parameters, num_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the size as JSON values."""
        return {
            "parameters": self.parameters,
            "bytes": self.num_bytes,
            "folder": self.folder or None,
        }


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def qualities(run: FinishedRun) -> list[Quality]:
    """Return all measures of a run that has a summary, in its order: perplexities first."""
    return [_quality(entry) for entry in run.summary.get("metrics") or ()]


def _quality(entry: Mapping[str, Any]) -> Quality:
    return Quality(
        entry["name"],
        entry["dataset"],
        entry["direction"] == "lower",
        {name: None if value is None else float(value) for name, value in entry["values"].items()},
        entry.get("samples_sha256"),
        entry.get("chance"),
        list(entry.get("medians_of_clients") or ()),
    )


def main_quality(run: FinishedRun) -> Quality | None:
    """Return the measure by which a run is judged first; None if its result was not evaluated.

    It is the first of the lowest ``rank``.
    """
    return min(evaluated(run), key=lambda one: one.rank, default=None)


def evaluated(run: FinishedRun) -> list[Quality]:
    """Return the measures that have a value of the result."""
    return [one for one in qualities(run) if one.values.get(FEDERATED) is not None]


def evaluated_of_client(run: FinishedRun, name: str) -> list[Quality]:
    """Return the measures of a client's own model, with its value in place of the mean."""
    clients = run.summary.get("clients") or ()
    found = (one.get("metrics", {}) for one in clients if one.get("site") == name)
    own: Mapping[str, float | None] = next(found, {})
    return [
        replace(one, values={**one.values, FEDERATED: value}, of_clients=())
        for one in qualities(run)
        if (value := own.get(f"{one.metric}/{one.dataset}/{FEDERATED}")) is not None
    ]


def size_of(run: FinishedRun, column: str) -> Size:
    """Return the size of the base (``DENSE``), the result (``FEDERATED``) or a baseline."""
    entry = run.summary.get("size", {}).get(column)
    if entry is None:
        return Size()
    return Size(entry["parameters"], entry["bytes"], entry["folder"] or "")
