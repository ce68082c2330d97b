"""Report of the regret study: Markdown tables and a plot."""

from pathlib import Path
from statistics import fmean, stdev

from benchmarks.fedspine.regret import FIXED, RANDOM, SUCB
from benchmarks.reporting.rows import Row, Rows

TITLE = "Regret of FedSpine's bandit"
SHOWN = (100, 200)
"""Rounds that the tables show; the plot shows the last one."""


def write_report(rows: Rows, path: Path) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
    seeds = len({row["seed"] for row in rows.rows})
    surfaces = list(dict.fromkeys(row["surface"] for row in rows.rows))
    lines = [
        f"# {TITLE}",
        "",
        (
            f"Cumulative regret, mean ± sample standard deviation over {seeds} seeds; noise of"
            f" {rows.conditions['noise']:g} in the bandit's reward; in brackets relative to"
            " uniformly random arms. S-UCB's rows say lambda, delta, xi; cells are those on the first"
            f" surface at the end. [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
    ]
    for mark in SHOWN:
        lines += _table(rows, surfaces, mark)
    path.with_suffix(".md").write_text("\n".join([*lines, f"![{TITLE}](./{path.name}.png)", ""]))
    _plot(rows, surfaces, path.with_suffix(".png"))


def _named(row: Row) -> str:
    return (
        row["policy"]
        if row["policy"] != SUCB
        else f"{row['discount']}, {row['granularity']}, {row['exploration']}"
    )


def _grouped(rows: Rows, surface: str, figure: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows.rows:
        if row["surface"] == surface and row[figure]:
            found.setdefault(_named(row), []).append(float(row[figure]))
    return found


def _table(rows: Rows, surfaces: list[str], mark: int) -> list[str]:
    by_surface = {surface: _grouped(rows, surface, f"regret_{mark}") for surface in surfaces}
    cells = _grouped(rows, surfaces[0], "cells")
    lines = [
        f"## After {mark} rounds",
        "",
        f"| | {' | '.join(surfaces)} | cells |",
        "|---|" + "---:|" * (len(surfaces) + 1),
    ]
    for name in by_surface[surfaces[0]]:
        texts = []
        for found in by_surface.values():
            spread = f" ± {stdev(found[name]):.1f}" if len(found[name]) > 1 else ""
            texts.append(
                f"{fmean(found[name]):.1f}{spread}"
                f" ({fmean(found[name]) / fmean(found[RANDOM]):.2f})"
            )
        lines.append(
            f"| {name} | {' | '.join(texts)} |"
            f" {f'{fmean(cells[name]):.0f}' if name in cells else ''} |"
        )
    return [*lines, ""]


def _plot(rows: Rows, surfaces: list[str], path: Path) -> None:
    """Plot the final regret relative to random arms.

    There is a panel per surface, a line per delta and xi, and a color per lambda.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bandits = [row for row in rows.rows if row["policy"] == SUCB]
    discounts = list(dict.fromkeys(row["discount"] for row in bandits))
    kinds = list(dict.fromkeys((row["granularity"], row["exploration"]) for row in bandits))
    figure = Figure(
        figsize=(3.0 + 2.8 * len(surfaces), 1.6 + 0.32 * len(kinds)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    for axes, surface in zip(
        figure.subplots(1, len(surfaces), sharey=True, squeeze=False)[0], surfaces, strict=True
    ):
        found = _grouped(rows, surface, f"regret_{SHOWN[-1]}")
        random = fmean(found[RANDOM])
        axes.axvline(1, color="grey", linewidth=1, label=RANDOM)
        axes.axvline(
            fmean(found[FIXED]) / random, color="grey", linestyle="--", linewidth=1, label=FIXED
        )
        for place, discount in enumerate(discounts):
            shares = [
                [value / random for value in found[f"{discount}, {delta}, {xi}"]]
                for delta, xi in kinds
            ]
            spreads = [stdev(values) if len(values) > 1 else 0.0 for values in shares]
            heights = [
                line + 0.2 * (place - (len(discounts) - 1) / 2) for line in range(len(kinds))
            ]
            label = f"S-UCB, lambda {discount}"
            axes.errorbar(
                [fmean(v) for v in shares],
                heights,
                xerr=spreads,
                fmt="o",
                markersize=4,
                capsize=2,
                label=label,
            )
        axes.set_yticks(range(len(kinds)), [f"delta {delta}, xi {xi}" for delta, xi in kinds])
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_xlim(left=-0.03)
        axes.set_title(surface, fontsize=10)
        axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.supxlabel(
        f"regret after {SHOWN[-1]} rounds, of that of random arms (lower is better)", fontsize=10
    )
    figure.suptitle(TITLE, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})
