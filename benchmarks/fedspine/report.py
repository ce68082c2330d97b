"""Report of the regret study: Markdown tables and a plot."""

from pathlib import Path
from statistics import fmean

from benchmarks.fedspine.regret import FIXED, MARKS, RANDOM, SUCB
from benchmarks.reporting.panels import (
    Panel,
    Reference,
    Series,
    StudyFigure,
    draw,
    picture,
    seeds_note,
)
from benchmarks.reporting.rows import Row, Rows
from benchmarks.reporting.tables import head_of, mean_and_spread
from espalier.results.style import GREY, METHODS, Look

TITLE = "Regret of FedSpine's bandit"
SHOWN = (100, 200)
"""Rounds that the tables show; the plot shows the last one."""
PLAYS = "How many plays the bandit needs"
CURVES = {
    "0.95, 0.2, 2.0": "the paper's 0.95, 0.2, 2",
    "0.98, 0.4, 0.01": "the defaults 0.98, 0.4, 0.01",
    "1.0, 0.4, 0.1": "1, 0.4, 0.1",
}
"""Bandits whose regret is shown by the number of plays, with their label in the figure."""


def write_report(rows: Rows, path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    seeds = len({row["seed"] for row in rows.rows})
    surfaces = list(dict.fromkeys(row["surface"] for row in rows.rows))
    lines = [
        f"# {TITLE}",
        "",
        (
            f"Cumulative regret, mean ± sample standard deviation over {seeds} seeds; noise of"
            f" {rows.conditions['noise']:g} in the bandit's reward; in brackets relative to"
            " uniformly random arms. S-UCB's rows say lambda, delta, xi; cells are those on the"
            " first surface at the"
            f" end. [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
    ]
    for mark in SHOWN:
        lines += _table(rows, surfaces, mark)
    plays = path.with_name(f"{path.name}-plays")
    lines += [*_plays_table(rows, surfaces), picture(plays, PLAYS), "", picture(path, TITLE), ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    draw(_figure(rows, surfaces, seeds), path, TITLE)
    draw(_plays_figure(rows, surfaces, seeds), plays, PLAYS)


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
        *head_of([*surfaces, "cells"], numbers=True),
    ]
    for name in by_surface[surfaces[0]]:
        texts = []
        for found in by_surface.values():
            share = fmean(found[name]) / fmean(found[RANDOM])
            texts.append(f"{mean_and_spread(found[name], 1)} ({share:.2f})")
        lines.append(
            f"| {name} | {' | '.join(texts)} |"
            f" {f'{fmean(cells[name]):.0f}' if name in cells else ''} |"
        )
    return [*lines, ""]


def _figure(rows: Rows, surfaces: list[str], seeds: int) -> StudyFigure:
    """Return the final regret relative to random arms.

    There is a panel per surface, a row per delta and xi, and a fill per lambda.
    """
    bandits = [row for row in rows.rows if row["policy"] == SUCB]
    discounts = sorted({row["discount"] for row in bandits}, key=float, reverse=True)
    kinds = dict.fromkeys((row["granularity"], row["exploration"]) for row in bandits)
    panels = []
    for surface in surfaces:
        found = _grouped(rows, surface, f"regret_{SHOWN[-1]}")
        random = fmean(found[RANDOM])
        series = [
            Series(
                f"S-UCB, lambda {discount}",
                METHODS["fedspine"].variant(number),
                {
                    f"delta {delta}, xi {xi}": [
                        value / random for value in found[f"{discount}, {delta}, {xi}"]
                    ]
                    for delta, xi in kinds
                },
            )
            for number, discount in enumerate(discounts)
        ]
        references = [
            Reference("uniformly random arms", 1.0, Look(GREY, "", "-")),
            Reference(FIXED, fmean(found[FIXED]) / random),
        ]
        label = f"regret after {SHOWN[-1]} rounds, relative to random arms"
        panels.append(Panel(surface, label, series, references, start=-0.03))
    return StudyFigure(panels, 2, seeds_note(seeds), rows=True, height=330)


def _relative(rows: Rows, surface: str, policy: str, mark: int) -> list[float]:
    """Return the regret of each seed after ``mark`` plays, relative to random arms."""
    found = _grouped(rows, surface, f"regret_{mark}")
    return [value / fmean(found[RANDOM]) for value in found.get(policy, ())]


def _plays_table(rows: Rows, surfaces: list[str]) -> list[str]:
    """Return the regret of ``CURVES`` by number of plays, the mean over surfaces and seeds."""
    shown = [policy for policy in CURVES if _relative(rows, surfaces[0], policy, MARKS[0])]
    lines = [
        "## By number of plays",
        "",
        "Relative to random arms, mean over the surfaces and seeds.",
        "",
        *head_of([CURVES[policy] for policy in shown], numbers=True, first="plays"),
    ]
    for mark in MARKS:
        means = [
            fmean(value for one in surfaces for value in _relative(rows, one, policy, mark))
            for policy in shown
        ]
        lines.append(f"| {mark} |{''.join(f' {mean:.2f} |' for mean in means)}")
    return [*lines, ""]


def _plays_figure(rows: Rows, surfaces: list[str], seeds: int) -> StudyFigure:
    """Return the regret of ``CURVES`` by number of plays, a panel per surface."""
    panels = [
        Panel(
            surface,
            "regret, relative to random arms",
            [
                Series(
                    f"S-UCB, {label}",
                    METHODS["fedspine"].variant(number),
                    {mark: _relative(rows, surface, policy, mark) for mark in MARKS},
                )
                for number, (policy, label) in enumerate(CURVES.items())
                if _relative(rows, surface, policy, MARKS[0])
            ],
            [Reference("uniformly random arms", 1.0, Look(GREY, "", "-"))],
            "plays",
        )
        for surface in surfaces
    ]
    return StudyFigure(panels, 2, seeds_note(seeds), shared=True)
