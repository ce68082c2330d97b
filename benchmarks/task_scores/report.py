"""Table and plot of scores on public tasks."""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.panels import Panel, Reference, Series, StudyFigure, draw, picture
from benchmarks.reporting.rows import Rows
from benchmarks.reporting.tables import head_of

KEYS = ("result", "task", "metric")
FIGURES = ("value", "stderr")
TITLE = "Smaller models on public tasks"
DENSE = "dense"
TUNED = ", tuned"
"""Ending of the labels of tuned results, which share a row of the figure with the untuned ones."""
BY_LENGTH = ("hellaswag",)
"""Tasks whose usual score divides the likelihood of an ending by its length."""
Scores = dict[str, tuple[float, float]]
"""Score and standard error by label of the result."""


def write_report(rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md``, and the figure ``<path>.svg`` if there are results."""
    scores = {task: _scores(rows, task) for task in conditions["data"]}
    labels = list(dict.fromkeys(row["result"] for row in rows.rows))
    versions = ", ".join(f"{name} {number}" for name, number in conditions["versions"].items())
    lines = [
        f"# {TITLE}",
        "",
        f"Accuracy ± standard error over the first {conditions['items']} items of each task, which"
        f" are the same for all models. Dense model `{conditions['model']['name']}`. {versions}."
        f" [Figures](./{path.name}.csv), [conditions](./{path.name}.json).",
        "",
        *head_of([_title(task) for task in scores], numbers=True),
    ]
    for label in labels:
        cells = [_cell(found, label) for found in scores.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    results = [label for label in labels if label != DENSE]
    if results:
        lines += ["", picture(path, TITLE)]
        draw(_figure(scores, results), path, TITLE)
    path.with_name(f"{path.name}.md").write_text("\n".join([*lines, ""]))


def _title(task: str) -> str:
    return f"{task}, by length" if task in BY_LENGTH else task


def _scores(rows: Rows, task: str) -> Scores:
    metric = "acc_norm" if task in BY_LENGTH else "acc"
    return {
        row["result"]: (float(row["value"]), float(row["stderr"] or 0))
        for row in rows.rows
        if (row["task"], row["metric"]) == (task, metric)
    }


def _cell(found: Scores, label: str) -> str:
    if label not in found:
        return ""
    value, error = found[label]
    return f"{value:.3f} ± {error:.3f}"


def _figure(scores: Mapping[str, Scores], results: list[str]) -> StudyFigure:
    """Return the figure: a panel for each task, a row for each result, tuned or not."""
    panels = []
    for task, found in scores.items():
        series = []
        for name, tuned in (("as pruned", False), ("tuned", True)):
            own = [label for label in results if label.endswith(TUNED) == tuned and label in found]
            places = {label.removesuffix(TUNED): label for label in own}
            # The values of each place have the score as mean and its error as deviation.
            values = {
                place: [found[label][0] + sign * found[label][1] / sqrt(2) for sign in (-1, 1)]
                for place, label in places.items()
            }
            looks = {place: look_of_arm(place).variant(0 if tuned else 1) for place in places}
            series.append(Series(name, looks, values))
        lines = [Reference(DENSE, found[DENSE][0])] if DENSE in found else []
        panels.append(Panel(_title(task), "accuracy", series, lines))
    return StudyFigure(panels, 2, "Score ± standard error over items", rows=True)
