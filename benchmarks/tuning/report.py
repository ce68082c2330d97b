"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.paired_comparison import Pair, paired_table
from benchmarks.reporting.panels import (
    Panel,
    Reference,
    Series,
    StudyFigure,
    draw,
    picture,
    seeds_note,
)
from benchmarks.reporting.rows import Rows
from benchmarks.reporting.tables import head_of, mean_and_spread

Cells = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Table:
    """Table and panel of the figure: a line per ``series``, a column per ``places``."""

    measure: str
    """Measure of the rows that are shown."""
    series: str
    places: str
    label: str
    """Label of the numbers."""
    joined: bool = True
    """True if places are ordered, so that a line joins them."""
    pairs: tuple[Pair, ...] = ()
    """Series that are compared in pairs."""
    axis: str = ""
    """Label of the places."""
    minus: str = ""
    """Series from which the panel shows the differences of the others, seed by seed."""
    hidden: str = ""
    """Series that the panel does not show."""


def write_report(
    title: str, tables: Sequence[Table], rows: Rows, conditions: dict[str, Any], path: Path
) -> None:
    """Write ``<path>.md`` and the figure."""
    seeds = sorted({row["seed"] for row in rows.rows})
    settings = ", ".join(f"{key} {value}" for key, value in conditions["settings"].items())
    lines = [
        f"# {title}",
        "",
        (
            f"Mean ± sample standard deviation over {len(seeds)} seeds. Model"
            f" `{conditions['model']['name']}`, {conditions['model']['parameters']:,} parameters;"
            f" {settings}. [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
    ]
    for table in tables:
        lines += _lines_of(table, rows)
        lines += paired_table(
            _by_seed(table, rows), table.pairs, cells_of(table, rows)[2], table.measure, digits=3
        )
    path.with_suffix(".md").write_text("\n".join([*lines, picture(path, title), ""]))
    panels = [_panel(table, rows) for table in tables]
    figure = StudyFigure(panels, len(panels), seeds_note(len(seeds)), height=300)
    draw(figure, path, title)


def cells_of(table: Table, rows: Rows) -> tuple[Cells, list[str], list[str]]:
    """Return values over seeds by (series, place), and both names in order of measurement."""
    cells: Cells = {}
    for row in rows.rows:
        if row["measure"] == table.measure:
            cells.setdefault((row[table.series], row[table.places]), []).append(float(row["value"]))
    return (
        cells,
        list(dict.fromkeys(one for one, _ in cells)),
        list(dict.fromkeys(place for _, place in cells)),
    )


def _by_seed(table: Table, rows: Rows) -> dict[tuple[str, str], dict[str, float]]:
    arms: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.rows:
        if row["measure"] == table.measure:
            arms.setdefault((row[table.series], row[table.places]), {})[row["seed"]] = float(
                row["value"]
            )
    return arms


def _lines_of(table: Table, rows: Rows) -> list[str]:
    cells, series, places = cells_of(table, rows)
    lines = [f"## {table.measure}: {table.label}", "", *head_of(places)]
    for one in series:
        texts = (mean_and_spread(cells.get((one, place), []), 3) for place in places)
        lines.append(f"| {one} | {' | '.join(texts)} |")
    return [*lines, ""]


def _panel(table: Table, rows: Rows) -> Panel:
    arms = _by_seed(table, rows)
    base = {place: own for (one, place), own in arms.items() if one == table.minus}
    _, names, places = cells_of(table, rows)
    series = [
        Series(
            name,
            look_of_arm(name),
            {
                place: [
                    value - (base[place][seed] if base else 0.0)
                    for seed, value in arms[name, place].items()
                ]
                for place in places
                if (name, place) in arms
            },
            table.joined,
        )
        for name in names
        if name not in (table.minus, table.hidden)
    ]
    zero = [Reference(table.minus, 0.0, look_of_arm(table.minus).variant(1))] if base else []
    label = f"{table.label},\nminus {table.minus}" if base else table.label
    return Panel(table.measure, label, series, zero, table.axis)
