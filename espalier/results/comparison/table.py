"""Comparison of runs as tables of text and numbers, and as the points of a plot."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.amounts import duration, size
from espalier.results.comparison.compared_runs import Comparison, Entry, best_of
from espalier.results.comparison.pareto import Plot, Point
from espalier.results.figures import Quality, figure_text
from espalier.settings.keys import as_text

COSTS = {
    "parameters": ("parameters of the model in use (millions)", 1e6),
    "disk": ("files of the model in use (MB)", 1e6),
    "bytes": ("bytes sent to and by all clients (MB)", 1e6),
    "seconds": ("time of the run (seconds)", 1.0),
}
"""Title and unit of the costs that a plot can have."""
MISSING = "-"


@dataclass(frozen=True)
class Cell:
    """Text of a table, and whether it is the best value of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class TableOf:
    """Table with a title for each column."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def results_table(comparison: Comparison, plot: Plot | None) -> TableOf:
    """Return quality, size and cost of each run; the last column marks the front of the plot."""
    titles = ["#", "run", "method", *(one.title for one in comparison.columns)]
    titles += ["parameters", "on disk", "bytes up", "bytes down", "time"]
    front = set()
    if plot is not None:
        titles.append("Pareto")
        front = {plot.points[index].label for index in plot.front}
    rows = [_original(comparison, len(titles))]
    for index, entry in enumerate(comparison.entries):
        cells = [Cell(str(index + 1)), Cell(entry.label), Cell(entry.method)]
        cells += [_quality_cell(comparison, index, one) for one in comparison.columns]
        cells += [Cell(text) for text in _costs(entry)]
        if plot is not None:
            cells.append(Cell("yes" if entry.label in front else ""))
        rows.append(cells)
    return TableOf(titles, rows)


def _original(comparison: Comparison, width: int) -> list[Cell]:
    """Return the row of the model from which all runs started."""
    original = comparison.entries[0].original
    texts = ["", comparison.entries[0].base_name, "dense"]
    for quality in comparison.columns:
        texts.append(figure_text(quality.metric, comparison.dense(quality)))
    texts += original.in_words()
    return [Cell(text) for text in texts] + [Cell("")] * (width - len(texts))


def _quality_cell(comparison: Comparison, index: int, quality: Quality) -> Cell:
    value = comparison.values.get((index, quality.key))
    if value is None:
        return Cell(MISSING)
    column = [comparison.values.get((row, quality.key)) for row in range(len(comparison.entries))]
    best = best_of(column, lower_is_better=quality.lower_is_better)
    return Cell(figure_text(quality.metric, value), best=value == best and len(column) > 1)


def _costs(entry: Entry) -> list[str]:
    """Return size and cost as text."""
    return [
        *entry.written.in_words(entry.original.parameters),
        _shown(entry.total("bytes_up"), size),
        _shown(entry.total("bytes_down"), size),
        _shown(entry.total("seconds"), duration),
    ]


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return MISSING if value is None else form(value)


def settings_table(comparison: Comparison) -> TableOf:
    """Return the settings that differ: a row per setting, and a column per run by its number."""
    numbers = [str(index + 1) for index in range(len(comparison.entries))]
    rows = [
        [Cell(key), *(Cell(_setting(value)) for value in values)]
        for key, values in comparison.differing.items()
    ]
    return TableOf(["setting", *numbers], rows)


def _setting(value: Any) -> str:
    return MISSING if value is None else as_text(value)


def notes(comparison: Comparison) -> list[str]:
    """Return sentences on excluded runs and values, and on results of several runs."""
    lines = [f"not compared: {label}: {reason}" for label, reason in comparison.excluded.items()]
    lines += comparison.gaps
    for entry in comparison.entries:
        if gone := entry.gone:
            lines.append(
                f"{entry.label}: its bytes and time are not known, because the directory of the run"
                f" that made its base model is gone ({gone}); restore it there, or beside the run"
            )
        if before := [run.name for run in entry.chain[:-1]]:
            lines.append(
                f"{entry.label}: its base model comes from {', '.join(before)}, whose bytes and"
                " time are included"
            )
    return lines


def plot_of(comparison: Comparison, metric: str, against: str) -> Plot | None:
    """Return the plot of one measure against a cost; None if fewer than two runs have both values.

    Raises InputError if no run has this measure.
    """
    quality = comparison.quality(metric)
    axis = comparison.axis(against)
    title, unit = COSTS[axis]
    points = []
    for index, entry in enumerate(comparison.entries):
        value = comparison.values.get((index, quality.key))
        cost = entry.cost(axis)
        if value is not None and cost is not None:
            points.append(Point(entry.label, entry.method, cost / unit, value))
    if len(points) < 2:
        return None
    dense = comparison.dense(quality)
    original = comparison.entries[0].original
    size_of_original = {"parameters": original.parameters, "disk": original.num_bytes}.get(axis)
    reference_cost = None if size_of_original is None else size_of_original / unit
    return Plot(points, quality.lower_is_better, quality.title, title, dense, reference_cost)


def csv_text(comparison: Comparison) -> str:
    """Return one line per run with plain numbers, all rows of its result table, and settings."""
    file = io.StringIO()
    rows = [_csv_row(comparison, index) for index in range(len(comparison.entries))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _csv_row(comparison: Comparison, index: int) -> dict[str, Any]:
    entry = comparison.entries[index]
    row: dict[str, Any] = {
        "run": entry.label,
        "directory": str(entry.run.path),
        "method": entry.method,
        "base_model": entry.base_name,
        "runs_before": " ".join(run.name for run in entry.chain[:-1]),
    }
    for quality in comparison.columns:
        if (index, quality.key) in comparison.values:
            own = entry.qualities[quality.key]
            # The run's own measure also has the values of its baselines.
            row |= {f"{own.title} {column}": value for column, value in own.values.items()}
    row |= {
        "parameters": entry.written.parameters,
        "bytes_on_disk": entry.written.num_bytes,
        "is_adapter": entry.written.is_adapter,
        "parameters_in_use": entry.used.parameters,
        "bytes_in_use": entry.used.num_bytes,
    }
    row |= {key: entry.total(key) for key in ("bytes_up", "bytes_down", "seconds")}
    return row | {key: _setting(values[index]) for key, values in comparison.differing.items()}
