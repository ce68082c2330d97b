"""Figures of the report, in the style of all figures (``espalier.results.style``)."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from espalier.amounts import size
from espalier.results.report.comparison import COLUMNS, Comparison
from espalier.results.report.layers import HeatMap
from espalier.results.report.rounds import Curve
from espalier.results.report.traffic import Kind
from espalier.results.style import (
    BLUE,
    GREY,
    MODELS,
    ORANGE,
    SEQUENTIAL,
    inline_svg,
    new_figure,
    series_look,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGARITHMIC_FROM = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
MAX_NAMED = 30
"""Maximum number of clients whose names a figure shows."""
MAX_HEIGHT = 1400.0
"""Maximum height of a figure in pixels."""
TITLE = 48
"""Number of characters in a line of a title."""
FEW = 12
"""Number of columns up to which a heat map has its values as text."""


def draw_comparison(comparisons: Sequence[Comparison]) -> str:
    """Return a figure with the values of all models by each measure, as SVG.

    Points show the clients, and lines the interval of the value.
    """
    heights = [1.0 + len(one.values) for one in comparisons]
    with new_figure(70 * len(comparisons) + 22 * sum(heights)) as figure:
        all_axes = figure.subplots(
            len(comparisons), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, comparison in zip(all_axes[:, 0], comparisons, strict=True):
            _draw_models(axes, comparison)
        return inline_svg(figure, "models", "Values of the models that the run compares")


def _draw_models(axes: "Axes", comparison: Comparison) -> None:
    columns = [column for column in COLUMNS if column in comparison.values]
    # The vertical axis points up, so the first model gets the highest place.
    for place, column in enumerate(reversed(columns)):
        value = comparison.values[column]
        look = MODELS[column]
        if value.clients:
            axes.scatter(
                list(value.clients.values()), [place] * len(value.clients), s=14, alpha=0.5,
                color=look.colour, linewidths=0,
            )  # fmt: skip
        if limits := value.interval:
            axes.plot(limits, [place, place], color=look.colour, linewidth=2)
        axes.plot([value.value], [place], look.marker, color=look.colour, markersize=8)
        axes.annotate(
            f"{value.value:,.{comparison.digits}f}", (value.value, place), xytext=(0, 7),
            textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip
    names = [comparison.names[column] for column in reversed(columns)]
    axes.set_yticks(range(len(columns)), names)
    axes.set_ylim(-0.6, len(columns) - 0.3)
    _set_scale(axes, [value for column in columns for value in _all(comparison, column)])
    better = "lower" if comparison.quality.lower_is_better else "higher"
    # Names longer than "local baseline" leave less room to the title, which is in bold.
    width = TITLE - 2 * max(0, max(map(len, names)) - len("local baseline"))
    axes.set_title(fill(f"{comparison.title} ({better} is better)", width), fontsize=10)


def _all(comparison: Comparison, column: str) -> list[float]:
    value = comparison.values[column]
    return [value.value, *value.clients.values(), *(value.interval or ())]


def _set_scale(axes: "Axes", values: Sequence[float]) -> None:
    """Set the limits of a value axis, with room for numbers, and its scale."""
    lowest = min(values)
    highest = max(values)
    if lowest > 0 and highest / lowest > LOGARITHMIC_FROM:
        axes.set_xscale("log")
        axes.set_xlim(lowest / 2, highest * 2)
        return
    room = 0.12 * (highest - lowest) or 0.05 * abs(highest) or 1.0
    axes.set_xlim(lowest - room, highest + room)
    axes.locator_params(axis="x", nbins=5)


def draw_clients(comparison: Comparison, sites: dict[int, str]) -> str:
    """Return a figure with the values of each client by one measure, as SVG."""
    columns = [column for column in COLUMNS if comparison.values.get(column, None)]
    with_clients = [column for column in columns if comparison.values[column].clients]
    clients = sorted(set().union(*(comparison.values[column].clients for column in with_clients)))
    # Sort by the last model that has values of clients, which is the federated one if it has any.
    last = with_clients[-1]
    own = comparison.values[last].clients
    clients.sort(key=lambda client: own.get(client, float("inf")), reverse=True)
    with new_figure(min(MAX_HEIGHT, 110 + 20 * min(len(clients), 2 * MAX_NAMED))) as figure:
        axes = figure.subplots()
        for column in with_clients:
            values = comparison.values[column].clients
            places = [place for place, client in enumerate(clients) if client in values]
            shown = [values[client] for client in clients if client in values]
            look = MODELS[column]
            axes.plot(shown, places, look.marker, color=look.colour, label=comparison.names[column])
        for column in columns:
            # One model for all clients is a line across them.
            if column not in with_clients:
                value = comparison.values[column].value
                style: dict[str, Any] = {
                    "color": MODELS[column].colour,
                    "linestyle": "--",
                    "linewidth": 1,
                }
                axes.axvline(value, label=comparison.names[column], **style)
        if len(clients) <= MAX_NAMED:
            axes.set_yticks(range(len(clients)), [sites[client] for client in clients])
        else:
            axes.set_yticks([])
            axes.set_ylabel(f"{len(clients)} clients, in order of their value")
        axes.set_ylim(-0.6, len(clients) - 0.4)
        _set_scale(axes, [value for column in columns for value in _all(comparison, column)])
        axes.set_title(fill(comparison.title, TITLE), fontsize=10)
        figure.legend(loc="outside lower center", ncols=2)
        return inline_svg(figure, f"clients-{_id(comparison)}", f"{comparison.title} by client")


def _id(comparison: Comparison) -> str:
    """Return letters, digits and hyphens that name a comparison within the page."""
    # Hexadecimal digits, because the name of a dataset may have any characters.
    text = f"{comparison.quality.metric}-{comparison.quality.dataset}".encode()
    return text.hex()


def draw_rounds(curves: Sequence[Curve], dense: Mapping[str, float]) -> str:
    """Return a figure with the values by round, as SVG.

    Parameters
    ----------
    dense : values of the dense model by title of a curve, drawn as dashed lines
    """
    with new_figure(200 * len(curves) + 60) as figure:
        all_axes = figure.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
        for axes, curve in zip(all_axes, curves, strict=True):
            for number, (name, points) in enumerate(curve.points.items()):
                look = MODELS["federated"] if name == "federated" else series_look(number)
                axes.plot(
                    list(points), list(points.values()), marker=look.marker, color=look.colour,
                    label=name,
                )  # fmt: skip
            if curve.title in dense:
                axes.axhline(dense[curve.title], color=GREY, linestyle="--", linewidth=1)
                axes.annotate(
                    "dense", (1, dense[curve.title]), xycoords=("axes fraction", "data"),
                    xytext=(-2, 2), textcoords="offset points", ha="right", fontsize=9,
                )  # fmt: skip
            axes.set_title(curve.title, fontsize=10)
            axes.locator_params(axis="x", integer=True)
        all_axes[-1].set_xlabel("round")
        if 1 < len(curves[0].points) <= MAX_NAMED:
            handles, labels = all_axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return inline_svg(figure, "rounds", "Quality of the result by round")


def draw_bytes(kinds: Sequence[Kind]) -> str:
    """Return a figure with the bytes of each kind of message in both directions, as SVG."""
    with new_figure(90 + 38 * len(kinds)) as figure:
        axes = figure.subplots()
        for offset, colour, label, values in (
            (-0.2, BLUE, "up: sites to server", [kind.up for kind in kinds]),
            (0.2, ORANGE, "down: server to sites", [kind.down for kind in kinds]),
        ):
            places = [place + offset for place in range(len(kinds))]
            axes.barh(places, values, height=0.36, color=colour, label=label)
            for place, value in zip(places, values, strict=True):
                axes.annotate(
                    size(value), (value, place), xytext=(3, 0), textcoords="offset points",
                    va="center", fontsize=8,
                )  # fmt: skip
        axes.set_yticks(range(len(kinds)), [kind.name for kind in kinds])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.18)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: size(value))
        figure.legend(loc="outside lower center", ncols=2)
        return inline_svg(figure, "bytes", "Bytes by kind of message")


def draw_heat_map(heat: HeatMap, number: int) -> str:
    """Return a heat map as SVG: blocks from top to bottom, with the values if there is room."""
    rows = [
        [float("nan") if value is None else value for value in row] for row in heat.rows.values()
    ]
    high = 1.0 if heat.percent else max((value for row in rows for value in row), default=1.0)
    with new_figure(min(MAX_HEIGHT, 120 + 20 * len(rows))) as figure:
        axes = figure.subplots()
        image = axes.imshow(rows, cmap=SEQUENTIAL, vmin=0, vmax=high or 1.0, aspect="auto")
        if len(heat.columns) <= FEW and len(rows) * 20 + 120 <= MAX_HEIGHT:
            _write_values(axes, rows, heat, high or 1.0)
        rotation = 0 if sum(map(len, heat.columns)) <= 40 else 30
        turned: dict[str, Any] = {"ha": "right", "rotation_mode": "anchor"} if rotation else {}
        axes.set_xticks(range(len(heat.columns)), heat.columns, rotation=rotation, **turned)
        # There is room for about 40 numbers.
        step = -(-len(rows) // 40)
        axes.set_yticks(range(0, len(rows), step), list(map(str, heat.rows))[::step])
        axes.grid(visible=False)
        axes.set_ylabel("block")
        axes.set_title(heat.title, fontsize=10)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, aspect=max(12, len(rows)))
        if heat.percent:
            bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        bar.outline.set_edgecolor(GREY)
        return inline_svg(figure, f"layers-{number}", heat.title)


def _write_values(
    axes: "Axes", rows: Sequence[Sequence[float]], heat: HeatMap, high: float
) -> None:
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value == value:  # not NaN
                # The colour map ends in yellow, on which white cannot be read.
                colour = "black" if value > 0.55 * high else "white"
                text = f"{value:.0%}" if heat.percent else f"{value:.2g}"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
