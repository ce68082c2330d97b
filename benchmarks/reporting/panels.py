"""Figures of studies: panels of values over seeds, in the common style of all figures.

A figure is 900 pixels wide. Its title says what is seen. The titles of the figures in a directory
are in its file ``titles.toml``, because a title is true for one set of measurements only; a figure
without an entry there has the title of its study.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil, log10
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from espalier.results.style import GREY, STUDY_WIDTH, Look, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = str | float
"""Row or position of a point: a name, or a number on a numeric axis."""
TITLES = "titles.toml"
TITLE_CHARACTERS = 84
LEGEND_CHARACTERS = 115
PLACES_CHARACTERS = 104
"""Number of characters that fit below the panels of a line."""
ROW_PIXELS = 23
PANEL_PIXELS = 250
SMALL = 9
"""Size of small texts in points; 12.5 pixels."""
DASHED = Look(GREY, "", "--")
"""Look of the line of the dense model."""
DOTTED = Look(GREY, "", ":")
"""Look of the line of a changed dense model."""
TEXT_SPREAD = "Mean ± standard deviation over {} seeds"


@dataclass(frozen=True)
class Series:
    """Points of one line of the legend."""

    label: str
    look: Look | Mapping[Any, Look]
    """Look of all points, or of each place; points with looks of their own are not joined."""
    values: Mapping[Any, Sequence[float]]
    """Values over seeds by place; a point is their mean, its bar the standard deviation."""
    joined: bool = True


@dataclass(frozen=True)
class Reference:
    """Straight line at a value."""

    label: str
    value: float
    look: Look = DASHED


@dataclass(frozen=True)
class Panel:
    """One coordinate system."""

    title: str
    label: str
    """Meaning and unit of the values."""
    series: Sequence[Series]
    references: Sequence[Reference] = ()
    places: str = ""
    """Meaning and unit of the places."""
    scale: Literal["linear", "log"] = "linear"
    start: float | None = None
    end: float | None = None
    """Limits of the axis, if they are fixed; points beyond the end are written as numbers."""


@dataclass(frozen=True)
class StudyFigure:
    """Panels of one figure, from left to right and from top to bottom."""

    panels: Sequence[Panel]
    columns: int
    note: str = ""
    """Explanation of points and bars, the title of the legend."""
    rows: bool = False
    """True if places are rows and values run to the right."""
    height: float = 0
    """Height of a panel in pixels; 0 follows from the number of rows."""
    shared: bool | Literal["row", "col"] = False
    """Panels that share their axis of values."""
    seeds: int = 0
    """Number of seeds; points with fewer values have their number beside them. 0: not shown."""


def seeds_note(number: int, fewer: bool = False) -> str:
    """Return the note of a figure whose points are means over seeds, some of ``fewer`` ones."""
    note = TEXT_SPREAD.format(number) if number > 1 else "One seed"
    return f"{note}; small numbers: of fewer seeds" if fewer else note


def title_of(path: Path, default: str) -> str:
    """Return the title of the figure ``path`` (no suffix), from the file of titles next to it."""
    file = path.with_name(TITLES)
    titles = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return str(titles.get(path.name, default))


def heading_of(path: Path, default: str) -> str:
    """Return ``title_of`` in lines that fit into the width of a figure."""
    return fill(title_of(path, default), TITLE_CHARACTERS)


def picture(path: Path, default: str) -> str:
    """Return the Markdown line that shows the figure ``path``, which lies beside the page."""
    return f"![{title_of(path, default)}](./{path.name}.svg)"


def draw(figure: StudyFigure, path: Path, default: str) -> None:
    """Write the figure as ``<path>.svg`` and ``<path>.png``; ``default`` is the study's title."""
    num_lines = ceil(len(figure.panels) / figure.columns)
    title = heading_of(path, default)
    labels = {one.label for panel in figure.panels for one in panel.series if one.label}
    labels |= {one.label for panel in figure.panels for one in panel.references}
    legend = ceil(len(labels) / _legend_columns(labels)) if labels else 0
    most = max(len(_places_of(figure, number)) for number in range(len(figure.panels)))
    height = figure.height or (70 + ROW_PIXELS * most if figure.rows else PANEL_PIXELS)
    total = num_lines * height + 26 * (title.count("\n") + 1) + 22 * legend + 50
    with new_figure(total, STUDY_WIDTH) as drawing:
        all_axes = drawing.subplots(
            num_lines, figure.columns, squeeze=False,
            sharex=figure.shared if figure.rows else False,
            sharey="row" if figure.rows else figure.shared,
        )  # fmt: skip
        drawn: dict[str, Any] = {}
        references: dict[str, Any] = {}
        for number, (axes, panel) in enumerate(zip_longest(all_axes.flat, figure.panels)):
            if panel is None:
                axes.remove()
                continue
            _draw_panel(axes, panel, _places_of(figure, number), figure, drawn, references)
            _label(axes, number, figure)
        drawing.suptitle(title, x=0.008, ha="left", weight="bold", size=12)
        if drawn := drawn | references:
            drawing.legend(
                drawn.values(), drawn.keys(), loc="outside lower center", fontsize=SMALL,
                ncols=_legend_columns(drawn), title=figure.note, title_fontsize=SMALL,
            )  # fmt: skip
        elif figure.note:
            drawing.supxlabel(figure.note, x=0.008, ha="left", size=SMALL, color=GREY)
        save_figure(drawing, path.with_name(f"{path.name}.svg"))


def _legend_columns(labels: Any) -> int:
    if sum(len(label) + 7 for label in labels) <= LEGEND_CHARACTERS:
        return len(labels)
    return max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))


def _label(axes: "Axes", number: int, figure: StudyFigure) -> None:
    """Label the axes of a panel, but not with what the panels below or to the left also have."""
    panel = figure.panels[number]
    x, y = (panel.label, panel.places) if figure.rows else (panel.places, panel.label)
    below = figure.panels[number + figure.columns :: figure.columns]
    names = ("label", "places") if figure.rows else ("places", "label")
    if not below or getattr(below[0], names[0]) != x:
        axes.set_xlabel(x)
    if number % figure.columns == 0 or getattr(figure.panels[number - 1], names[1]) != y:
        axes.set_ylabel(y)


def _places_of(figure: StudyFigure, number: int) -> list[Place]:
    """Return the places of a panel: names in the order of the figure, numbers ascending.

    The panels of a line share their rows.
    """
    every = list(dict.fromkeys(place for panel in figure.panels for place in _places(panel)))
    first = number - number % figure.columns
    line = figure.panels[first : first + figure.columns] if figure.rows else [figure.panels[number]]
    own = {place for panel in line for place in _places(panel)}
    if any(isinstance(place, str) for place in own):
        return [place for place in every if place in own]
    return sorted(own)


def _places(panel: Panel) -> list[Place]:
    return list(dict.fromkeys(place for one in panel.series for place in one.values))


def _draw_panel(
    axes: "Axes",
    panel: Panel,
    places: Sequence[Place],
    figure: StudyFigure,
    drawn: dict[str, Any],
    references: dict[str, Any],
) -> None:
    rows = figure.rows
    named = any(isinstance(place, str) for place in places)
    loose = [n for n, one in enumerate(panel.series) if rows or (named and not one.joined)]
    for number, one in enumerate(panel.series):
        # Points of one place that no line joins are drawn next to each other.
        step = min(0.22, 0.8 / max(1, len(loose)))
        shift = step * (loose.index(number) - (len(loose) - 1) / 2) if number in loose else 0.0
        if rows and panel.end is not None:
            one = _within(axes, one, places, panel.end)
        at = [(places.index(place) if named else float(place)) + shift for place in one.values]
        handle = _draw_series(axes, one, at, rows)
        drawn |= {one.label: handle} if one.label else {}
        if rows and figure.seeds:
            _count_seeds(axes, one, at, figure.seeds)
    for reference in panel.references:
        line = (axes.axvline if rows else axes.axhline)(
            reference.value, color=reference.look.colour, linestyle=reference.look.line,
            linewidth=1.4, zorder=1,
        )  # fmt: skip
        references[reference.label] = line
    axes.set_title(panel.title, size=10)
    axes.tick_params(labelsize=SMALL)
    if rows:
        axes.set_yticks(range(len(places)), list(map(str, places)))
        axes.set_ylim(len(places) - 0.5, -0.5)
    elif named:
        width = max(6, int(PLACES_CHARACTERS / figure.columns / len(places)))
        axes.set_xticks(range(len(places)), [_wrapped(str(place), width) for place in places])
        axes.set_xlim(-0.5, len(places) - 0.5)
    _scale(axes, panel, rows)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(fill(line, width) for line in text.split("\n"))


FEW_DECADES = 0.5
"""Powers of ten below which a logarithmic axis has evenly spaced numbers."""


def _scale(axes: "Axes", panel: Panel, rows: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    class Ticks(LogLocator):
        """Ticks whose numbers have room: fewer, if the axis spans more powers of ten."""

        def tick_values(self, vmin: float, vmax: float) -> Any:
            span = log10(vmax / vmin) if 0 < vmin < vmax else 0.0
            if span < FEW_DECADES:
                return MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(vmin, vmax)
            self.set_params(subs=(1, 2, 3, 5, 7) if span < 1.8 else (1, 2, 5) if span < 3 else (1,))
            return super().tick_values(vmin, vmax)

    axis = axes.xaxis if rows else axes.yaxis
    if panel.scale == "log":
        (axes.set_xscale if rows else axes.set_yscale)("log")
        axis.set_major_locator(Ticks())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    elif rows:
        axes.locator_params(axis="x", nbins=6)
    # Setting limits ends the automatic scale of all panels that share an axis.
    if panel.start is not None or panel.end is not None:
        (axes.set_xlim if rows else axes.set_ylim)(panel.start, panel.end)


def _within(axes: "Axes", one: Series, places: Sequence[Place], end: float) -> Series:
    """Write the values that lie beyond the end of the axis; return the points that do not."""
    for place, values in one.values.items():
        if (mean := fmean(values)) > end:
            text = f"{mean:,.0f} →"
            axes.text(end, places.index(place), text, ha="right", va="center", size=SMALL)
    return replace(one, values={at: own for at, own in one.values.items() if fmean(own) <= end})


def _draw_series(axes: "Axes", one: Series, at: Sequence[float], rows: bool) -> Any:
    """Draw the points of a series, and return what stands for it in the legend."""
    from matplotlib.lines import Line2D

    means = [fmean(values) for values in one.values.values()]
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in one.values.values()]
    looks = [one.look if isinstance(one.look, Look) else one.look[place] for place in one.values]
    joined = one.joined and not rows and isinstance(one.look, Look)
    if joined and looks:
        axes.plot(at, means, color=looks[0].colour, linestyle=looks[0].line, zorder=2)
    for look in dict.fromkeys(looks):
        mine = [number for number, other in enumerate(looks) if other == look]
        places, values, bars = ([every[n] for n in mine] for every in (at, means, spreads))
        # A single value has no bar, not one of no length.
        spread = bars if any(bars) else None
        axes.errorbar(
            values if rows else places, places if rows else values,
            xerr=spread if rows else None, yerr=None if rows else spread,
            linestyle="", capsize=2.5, elinewidth=1.2, zorder=3, **_marker(look),
        )  # fmt: skip
    shown = one.look if isinstance(one.look, Look) else _in_grey(looks)
    return Line2D([], [], linestyle=shown.line if joined else "", **_marker(shown))


def _count_seeds(axes: "Axes", one: Series, at: Sequence[float], seeds: int) -> None:
    """Write the number of values above the points that have fewer than ``seeds``; in rows only."""
    for values, row in zip(one.values.values(), at, strict=True):
        if len(values) < seeds:
            axes.annotate(
                f"{len(values)}", (fmean(values), row), (0, 4.5), textcoords="offset points",
                ha="center", size=SMALL - 1, color=GREY,
            )  # fmt: skip


def _marker(look: Look) -> dict[str, Any]:
    from matplotlib.colors import to_rgb

    light = tuple(0.35 * part + 0.65 for part in to_rgb(look.colour))
    face = {"full": look.colour, "none": "white", "light": light}[look.fill]
    return {
        "marker": look.marker, "color": look.colour, "markersize": 7, "markerfacecolor": face,
        "markeredgewidth": 1.0,
    }  # fmt: skip


def _in_grey(looks: Sequence[Look]) -> Look:
    """Return the look that stands for points of several colours: a grey dot of their fill."""
    fills = {look.fill for look in looks}
    return Look(GREY, "o", "", fills.pop() if len(fills) == 1 else "full")
