"""Pareto plot: quality of results against their size or cost."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure

from espalier.settings.methods import METHODS

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of Okabe and Ito that colour-blind people can tell apart, without yellow."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
OTHER = ("#555555", "o")
INCHES = (9.0, 5.4)
DOTS_PER_INCH = 100
MAX_IN_LEGEND = 14
"""Maximum number of runs that the legend names; the table names all."""
MAX_CHARACTERS = 44


@dataclass(frozen=True)
class Point:
    """One result in the plot."""

    label: str
    method: str
    cost: float
    quality: float


@dataclass(frozen=True)
class Plot:
    """Contents of a plot."""

    points: Sequence[Point]
    lower_is_better: bool
    quality_title: str
    cost_title: str
    reference: float | None = None
    """Quality of the model without changes, as a horizontal line."""


def style_of(method: str) -> tuple[str, str]:
    """Return the colour and the marker of a method, which are the same in all plots."""
    known = list(METHODS)
    if method not in known:
        return OTHER
    place = known.index(method)
    return OKABE_ITO[place % len(OKABE_ITO)], MARKERS[place % len(MARKERS)]


def front_of(
    costs: Sequence[float], qualities: Sequence[float], *, lower_is_better: bool
) -> list[int]:
    """Return the indices of the points on the Pareto front, by increasing cost.

    A point is on the front if no other is at least as good in both values and better in one.
    """
    sign = 1 if lower_is_better else -1
    places = [(cost, sign * quality) for cost, quality in zip(costs, qualities, strict=True)]
    front = [
        index
        for index, place in enumerate(places)
        if not any(_dominates(other, place) for other in places)
    ]
    return sorted(front, key=lambda index: places[index])


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def draw(plot: Plot, form: str) -> bytes:
    """Return the plot as a ``png`` or ``svg`` file; equal plots have equal bytes."""
    with rc_context({"svg.hashsalt": "espalier", "svg.fonttype": "none", "font.size": 11}):
        figure = _figure(plot)
        file = io.BytesIO()
        # Without a date, the file does not depend on when it is drawn.
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(file, format=form, dpi=DOTS_PER_INCH, metadata=metadata)
    return file.getvalue()


def _figure(plot: Plot) -> Figure:
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.add_subplot()
    costs = [point.cost for point in plot.points]
    values = [point.quality for point in plot.points]
    front = front_of(costs, values, lower_is_better=plot.lower_is_better)
    if plot.reference is not None:
        axes.axhline(plot.reference, color="#777777", linestyle=":", label="original model")
    axes.plot(
        [costs[index] for index in front],
        [values[index] for index in front],
        drawstyle="steps-post",
        color="#777777",
        linewidth=1,
        label="Pareto front",
        zorder=1,
    )
    for index, point in enumerate(plot.points):
        colour, marker = style_of(point.method)
        text = f"{index + 1}  {_short(point.label)}"
        axes.scatter(
            [point.cost],
            [point.quality],
            s=60,
            color=colour,
            marker=marker,
            edgecolors="white" if index not in front else "black",
            label=text if index < MAX_IN_LEGEND else None,
            zorder=2,
        )
        axes.annotate(
            str(index + 1), (point.cost, point.quality), (6, 5), textcoords="offset points"
        )
    better = "lower" if plot.lower_is_better else "higher"
    axes.set_title(f"{plot.quality_title} against {plot.cost_title.split(' (')[0]}", loc="left")
    axes.set_ylabel(f"{plot.quality_title} ({better} is better)")
    axes.set_xlabel(plot.cost_title)
    axes.margins(0.08)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _short(label: str) -> str:
    return label if len(label) <= MAX_CHARACTERS else f"…{label[1 - MAX_CHARACTERS :]}"
