"""Bar charts of the task study: time to a common score by fleet, and scores by alpha."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Row

Bars = Mapping[str, Mapping[str, float]]
"""Heights of bars by group and model."""
WHAT_ALL_COME_TO = "seconds to what all come to"
WITH_ALPHA = "seconds to what all come to with this alpha"


def by_fleet(rows: Sequence[Row], curves: Sequence[Row], share: str, of_loss: bool) -> Bars:
    """Return the seconds in each fleet until a model reaches the common score; seed 0.

    The common score is one that all models reach in all fleets. Only models that were measured with
    every fleet have bars. Rounds without a measurement are ignored.
    """
    counted = [row for row in curves if row["seed"] == "0" and row["share"] in (share, "0.0")]
    measured = {row["fleet"] for row in rows if row["model"] == "bandits" and row["share"] == share}
    fleets = [fleet for fleet in ("low", "medium", "high") if fleet in measured]
    own = {fleet: {row["model"] for row in counted if row["fleet"] == fleet} for fleet in fleets}
    models = [
        model
        for model in dict.fromkeys(row["model"] for row in counted)
        if all(model in own[at] for at in fleets)
    ]
    if len(fleets) < 2 or not models:
        return {}
    best, worst = (min, max) if of_loss else (max, min)
    points = {
        (fleet, model): _points(counted, fleet, model) for fleet in fleets for model in models
    }
    target = worst(best(score for _, score in found) for found in points.values())
    return {
        fleet: {
            model: min(
                at
                for at, score in points[fleet, model]
                if (score <= target if of_loss else score >= target)
            )
            for model in models
        }
        for fleet in fleets
    }


def _points(rows: Sequence[Row], fleet: str, model: str) -> list[tuple[float, float]]:
    own = [row for row in rows if (row["fleet"], row["model"]) == (fleet, model)]
    return [(float(row["seconds"]), float(row["score"])) for row in own]


def by_alpha(rows: Sequence[Row], fleet: str, share: str, alpha: float) -> Bars:
    """Return the scores of models with several values of alpha, most even first; seed 0."""
    found = {
        own: {row["model"]: float(row["score"]) for row in one}
        for own, one in _of_alphas(rows, fleet, share, alpha)
    }
    return {f"alpha {own:g}": scores for own, scores in found.items()}


def times_by_alpha(
    curves: Sequence[Row], fleet: str, share: str, alpha: float, of_loss: bool
) -> Bars:
    """Return the seconds until models reach the score common to their alpha (figure 6); seed 0.

    Each alpha has its own target, because more uneven data lead to lower scores. Rounds without a
    measurement are ignored.
    """
    bars: dict[str, dict[str, float]] = {}
    best, worst = (min, max) if of_loss else (max, min)
    for own, found in _of_alphas(curves, fleet, share, alpha):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in found:
            points.setdefault(row["model"], []).append((float(row["seconds"]), float(row["score"])))
        target = worst(best(score for _, score in of_model) for of_model in points.values())
        bars[f"alpha {own:g}\n(to {target:.3g})"] = {
            model: min(
                at for at, score in of_model if (score <= target if of_loss else score >= target)
            )
            for model, of_model in points.items()
        }
    return bars


def _of_alphas(
    rows: Sequence[Row], fleet: str, share: str, alpha: float
) -> list[tuple[float, list[Row]]]:
    """Return rows by alpha, the largest first, of models that were measured with several alphas.

    The model names in these rows do not contain the alpha.
    """
    counted = [
        row
        for row in rows
        if row["seed"] == "0" and row["fleet"] == fleet and row["share"] in (share, "0.0")
    ]
    found: dict[float, list[Row]] = {}
    for row in counted:
        model, marked, own = row["model"].partition(", alpha ")
        if marked:
            found.setdefault(float(own), []).append({**row, "model": model})
    models = {row["model"] for own in found.values() for row in own}
    if models:
        found[alpha] = [row for row in counted if row["model"] in models]
    return sorted(found.items(), reverse=True)


def plot(panels: Mapping[str, Bars], title: str, path: Path) -> None:
    """Plot grouped bars, a panel per label of the vertical axis."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4.0 * len(panels), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    models = list(
        dict.fromkeys(
            model for bars in panels.values() for heights in bars.values() for model in heights
        )
    )
    colours = {
        model: colormaps["tab20" if len(models) > 10 else "tab10"](place % 20)
        for place, model in enumerate(models)
    }
    drawn: dict[str, Any] = {}
    for axes, (label, bars) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        own = [model for model in models if any(model in heights for heights in bars.values())]
        width = 0.8 / len(own)
        for place, model in enumerate(own):
            at = [
                group + (place - (len(own) - 1) / 2) * width
                for group, name in enumerate(bars)
                if model in bars[name]
            ]
            heights = [bars[name][model] for name in bars if model in bars[name]]
            drawn[model] = axes.bar(at, heights, width, color=colours[model])
        axes.set_xticks(range(len(bars)), list(bars))
        axes.set_ylabel(label)
        axes.set_ylim(
            *_limits([height for heights in bars.values() for height in heights.values()], label)
        )
        axes.grid(axis="y", alpha=0.3)
    figure.axes[-1].legend(
        drawn.values(), drawn.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def plot_devices(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot the mean seconds of each device's round, a line per run (figure 2c); seed 0.

    Devices are sorted by speed, the fastest first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    counted = [
        row
        for row in rows
        if row["seed"] == "0" and row["fleet"] == "high" and row["model"].endswith(" rounds")
    ]
    for model in dict.fromkeys(row["model"] for row in counted):
        seconds = sorted(float(row["seconds"]) for row in counted if row["model"] == model)
        axes.plot(range(1, len(seconds) + 1), seconds, "o-", markersize=3, linewidth=1, label=model)
    axes.set_xlabel("devices, the fastest first")
    axes.set_ylabel("seconds of a round, mean")
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _limits(heights: Sequence[float], label: str) -> tuple[float, float]:
    """Return axis limits: times start at 0, scores slightly below the smallest one.

    Only differences between scores matter.
    """
    room = 0.1 * (max(heights) - min(heights))
    return (
        (0.0, max(heights) * 1.05)
        if label in (WHAT_ALL_COME_TO, WITH_ALPHA)
        else (min(heights) - 3 * room, max(heights) + room)
    )
