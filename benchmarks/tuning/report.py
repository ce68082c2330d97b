"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.reporting.paired import Pair, paired_table
from benchmarks.reporting.rows import Rows

Cells = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Panel:
    """One table, and one part of the plot: a line per ``series``, a column per ``places``."""

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


def write_report(
    title: str, panels: Sequence[Panel], rows: Rows, conditions: dict[str, Any], path: Path
) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
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
    for panel in panels:
        lines += _table(panel, rows)
        lines += paired_table(
            _by_seed(panel, rows), panel.pairs, cells_of(panel, rows)[2], panel.measure, digits=3
        )
    path.with_suffix(".md").write_text("\n".join([*lines, f"![{title}](./{path.name}.png)", ""]))
    _plot(title, panels, rows, path.with_suffix(".png"))


def cells_of(panel: Panel, rows: Rows) -> tuple[Cells, list[str], list[str]]:
    """Return values over seeds by (series, place), and both names in order of measurement."""
    cells: Cells = {}
    for row in rows.rows:
        if row["measure"] == panel.measure:
            cells.setdefault((row[panel.series], row[panel.places]), []).append(float(row["value"]))
    return (
        cells,
        list(dict.fromkeys(one for one, _ in cells)),
        list(dict.fromkeys(place for _, place in cells)),
    )


def _by_seed(panel: Panel, rows: Rows) -> dict[tuple[str, str], dict[str, float]]:
    arms: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.rows:
        if row["measure"] == panel.measure:
            arms.setdefault((row[panel.series], row[panel.places]), {})[row["seed"]] = float(
                row["value"]
            )
    return arms


def _table(panel: Panel, rows: Rows) -> list[str]:
    cells, series, places = cells_of(panel, rows)
    lines = [
        f"## {panel.measure}: {panel.label}",
        "",
        f"| | {' | '.join(places)} |",
        "|---|" + "---|" * len(places),
    ]
    for one in series:
        lines.append(
            f"| {one} | "
            + " | ".join(_cell(cells.get((one, place), [])) for place in places)
            + " |"
        )
    return [*lines, ""]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _plot(title: str, panels: Sequence[Panel], rows: Rows, path: Path) -> None:
    """Plot the panels next to each other, as dots with the spread over seeds.

    Dots without a joining line are slightly shifted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 5.0 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        cells, series, places = cells_of(panel, rows)
        for number, one in enumerate(series):
            found = [
                (at, cells[one, place]) for at, place in enumerate(places) if (one, place) in cells
            ]
            shift = 0.0 if panel.joined else 0.6 * (number + 0.5) / len(series) - 0.3
            at = [place + shift for place, _ in found]
            means = [fmean(values) for _, values in found]
            spreads = [stdev(values) if len(values) > 1 else 0.0 for _, values in found]
            axes.errorbar(
                at,
                means,
                yerr=spreads,
                fmt="o-" if panel.joined else "o",
                markersize=5,
                capsize=2,
                label=one,
            )
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel({"setting": "alpha"}.get(panel.places, ""))
        axes.set_ylabel(panel.label)
        axes.set_title(panel.measure, fontsize=10)
        axes.grid(alpha=0.3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=120, metadata={"Software": None})
