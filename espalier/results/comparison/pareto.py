"""Pareto plot: quality of results against their size or cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from espalier.results.style import BLACK, GREY, STUDY_WIDTH, figure_bytes, look_of, new_figure

HEIGHT = 440
"""Height in pixels without the legend."""
ROW = 20
"""Height of a row of the legend, in pixels."""
COLUMNS = 2
"""Number of columns of the legend."""
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
    """Quality of the original model, as a horizontal line."""
    reference_cost: float | None = None
    """Size of the original model; None if the cost is that of a run, which it has not."""

    @property
    def front(self) -> list[int]:
        """Indices of the points on the Pareto front, by increasing cost."""
        costs = [point.cost for point in self.points]
        qualities = [point.quality for point in self.points]
        original = None
        if self.reference is not None and self.reference_cost is not None:
            original = (self.reference_cost, self.reference)
        return front_of(costs, qualities, original, lower_is_better=self.lower_is_better)


def front_of(
    costs: Sequence[float],
    qualities: Sequence[float],
    original: tuple[float, float] | None = None,
    *,
    lower_is_better: bool,
) -> list[int]:
    """Return the indices of the points on the Pareto front, by increasing cost.

    A point is on the front if neither another nor ``original``, the cost and quality of the model
    without changes, is at least as good in both values and better in one.
    """
    # With this sign, lower is better in both values.
    sign = 1 if lower_is_better else -1
    places = [(cost, sign * quality) for cost, quality in zip(costs, qualities, strict=True)]
    rivals = places if original is None else [*places, (original[0], sign * original[1])]
    front = [
        index
        for index, place in enumerate(places)
        if not any(_dominates(other, place) for other in rivals)
    ]
    return sorted(front, key=lambda index: places[index])


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def draw(plot: Plot, form: str) -> bytes:
    """Return the plot as a ``png`` or ``svg`` file; equal plots have equal bytes."""
    # Below the plot, so that long names of runs leave the title and the points their room.
    rows = -(-(min(len(plot.points), MAX_IN_LEGEND) + 2) // COLUMNS)
    with new_figure(HEIGHT + rows * ROW, STUDY_WIDTH) as figure:
        _draw(plot, figure)
        return figure_bytes(figure, form)


def _draw(plot: Plot, figure: Figure) -> None:
    axes = figure.add_subplot()
    front = plot.front
    if plot.reference is not None:
        axes.axhline(plot.reference, color=GREY, linestyle=":", label="original model")
        if plot.reference_cost is not None:
            axes.plot([plot.reference_cost], [plot.reference], "x", color=GREY, markersize=8)
    # Between two points of the front, the cheaper one is the best that there is.
    axes.plot(
        [plot.points[index].cost for index in front],
        [plot.points[index].quality for index in front],
        drawstyle="steps-post",
        color=GREY,
        linewidth=1,
        label="Pareto front",
        zorder=1,
    )
    for index, point in enumerate(plot.points):
        look = look_of(point.method)
        text = f"{index + 1}  {_short(point.label)}"
        axes.scatter(
            [point.cost],
            [point.quality],
            s=60,
            color=look.colour,
            marker=look.marker,
            edgecolors="white" if index not in front else BLACK,
            label=text if index < MAX_IN_LEGEND else None,
            zorder=2,
        )
        axes.annotate(
            str(index + 1), (point.cost, point.quality), (6, 5), textcoords="offset points"
        )
    better = "lower" if plot.lower_is_better else "higher"
    axes.set_title(f"{plot.quality_title} against {plot.cost_title.split(' (')[0]}")
    axes.set_ylabel(f"{plot.quality_title} ({better} is better)")
    axes.set_xlabel(plot.cost_title)
    axes.margins(0.08)
    figure.legend(loc="outside lower left", ncols=COLUMNS, fontsize=9)


def _short(label: str) -> str:
    return label if len(label) <= MAX_CHARACTERS else f"…{label[1 - MAX_CHARACTERS :]}"
