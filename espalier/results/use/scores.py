"""Scores of a run's models on public tasks: their file in the run directory, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from espalier.results.finished_run import FinishedRun
from espalier.storage.atomic import write_json

FILE = "lm_eval.json"
"""Name of the file in the run directory."""
IDENTITY = ("model", "task", "metric", "num_fewshot", "limit", "data_sha256")
"""Keys that distinguish two stored scores."""
SHORT_HASH = 8
"""Number of hexadecimal digits of a hash in a table."""


@dataclass(frozen=True)
class Score:
    """One number of lm-evaluation-harness.

    Parameters
    ----------
    model : ``result``, ``base`` or the name of a client
    task : name of the task
    metric : name of the metric, such as ``acc``
    value : the score
    stderr : standard error of the score; None if the harness has none
    items : number of items
    num_fewshot : number of examples before each item
    data_sha256 : hash of the local file with the items; None if they are those of the hub
    """

    model: str
    task: str
    metric: str
    value: float
    stderr: float | None
    items: int
    num_fewshot: int
    data_sha256: str | None = None


def store(run: FinishedRun, scores: Sequence[Score], harness: str, limit: int | None) -> None:
    """Add scores to the file of the run; a repeated evaluation replaces the earlier one.

    Parameters
    ----------
    harness : version of lm-evaluation-harness
    limit : maximum number of items per task; None for all
    """
    entries = [asdict(score) | {"limit": limit, "lm_eval": harness} for score in scores]
    new = {_identity(entry) for entry in entries}
    earlier = run.json(FILE).get("scores", [])
    kept = [entry for entry in earlier if _identity(entry) not in new]
    write_json(run.path / FILE, {"scores": [*kept, *entries]})


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in IDENTITY)


@dataclass(frozen=True)
class ScoreRow:
    """Scores of several models by one measure on the same items.

    Parameters
    ----------
    task, metric, items, num_fewshot, data_sha256 : as in ``Score``
    values : the score of each model by its name, with its standard error or None
    """

    task: str
    metric: str
    items: int
    num_fewshot: int
    data_sha256: str | None
    values: Mapping[str, tuple[float, float | None]]

    @property
    def title(self) -> str:
        """Name of the task for a table, with the beginning of the hash of a local file."""
        return self.task + data_in_words(self.data_sha256)


def data_in_words(data_sha256: str | None) -> str:
    """Return what follows the name of a task whose items are in a local file; empty for others."""
    return "" if data_sha256 is None else f", local file {data_sha256[:SHORT_HASH]}"


def stored_rows(run: FinishedRun) -> list[ScoreRow]:
    """Return the stored scores of a run; empty if it was not evaluated on public tasks."""
    rows: dict[tuple[Any, ...], dict[str, tuple[float, float | None]]] = {}
    for score in run.json(FILE).get("scores", ()):
        key = (
            *(score[name] for name in ("task", "metric", "items", "num_fewshot")),
            score.get("data_sha256"),
        )
        rows.setdefault(key, {})[score["model"]] = (score["value"], score.get("stderr"))
    names = ("task", "metric", "items", "num_fewshot", "data_sha256")
    return [
        ScoreRow(**dict(zip(names, key, strict=True)), values=values)
        for key, values in rows.items()
    ]


def whole_scores(run: FinishedRun, model: str) -> list[Mapping[str, Any]]:
    """Return the stored scores of one model on all items of their tasks, as ``Score``'s fields."""
    scores = run.json(FILE).get("scores", ())
    return [one for one in scores if one["model"] == model and one.get("limit") is None]


def show_table(scores: Sequence[Score]) -> None:
    """Print a table with a row per task and metric, and a column per model."""
    from rich.console import Console
    from rich.table import Table

    models = list(dict.fromkeys(score.model for score in scores))
    table = Table("task", "metric", "items", "examples")
    for model in models:
        table.add_column(model, justify="right")
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for score in scores:
        row = (score.task, score.metric, str(score.items), str(score.num_fewshot))
        error = "" if score.stderr is None else f" ±{score.stderr:.4f}"
        rows.setdefault(row, {})[score.model] = f"{score.value:.4f}{error}"
    for titles, cells in rows.items():
        table.add_row(*titles, *(cells.get(model, "") for model in models))
    Console().print(table)
