"""Energy of each rank of the global update by round, for methods with different ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reporting.panels import Panel, Series, StudyFigure, draw, picture, seeds_note
from benchmarks.reporting.rows import Rows
from benchmarks.reporting.tables import head_of
from espalier.results.style import METHODS

ENDING = "-energy"
KEYS = ("seed", "arm", "round", "rank")
FIGURES = ("share",)
SHOWN = 4
"""Maximum number of rounds in the figure."""
MARKERS = ("h", "s", "^", "D")
"""Markers of the rounds in the figure."""
TITLE = "Energy of each rank over the rounds"


def rows_beside(path: Path, conditions: dict[str, Any]) -> Rows:
    """Return the rows of the study ``path``, a path without suffix."""
    return Rows(path.with_name(f"{path.name}{ENDING}.csv"), KEYS, FIGURES, conditions)


def add_energy(rows: Rows, seed: int, arm: str, run: Path) -> None:
    """Record what a run's ``summary.json`` says; nothing for methods that do not report it."""
    document = json.loads((run / "summary.json").read_text())
    by_round = document.get("report", {}).get("rank_energy", [])
    rows.add_all(
        ({"seed": seed, "arm": arm, "round": number, "rank": rank}, {"share": share})
        for number, shares in enumerate(by_round, start=1)
        for rank, share in enumerate(shares, start=1)
    )


def energy_section(path: Path, conditions: dict[str, Any]) -> list[str]:
    """Write the figure, and return the lines of the table; none if no energy was recorded."""
    if not path.with_name(f"{path.name}{ENDING}.csv").exists():
        return []
    rows = rows_beside(path, conditions)
    if not rows.rows:
        return []
    arms = list(dict.fromkeys(row["arm"] for row in rows.rows))
    rounds = sorted({int(row["round"]) for row in rows.rows})
    ranks = sorted({int(row["rank"]) for row in rows.rows})
    drawn = path.with_name(f"{path.name}{ENDING}")
    lines = [
        f"## {TITLE}",
        "",
        "Percent of the squared singular values of all matrices' updates, mean over seeds.",
        "",
        *head_of([f"rank {rank}" for rank in ranks], numbers=True, first="arm, round"),
    ]
    for arm in arms:
        for number in rounds:
            means = [100 * fmean(_shares(rows, arm, number, rank)) for rank in ranks]
            lines.append(f"| {arm}, {number} |{''.join(f' {mean:.2g} |' for mean in means)}")
    shown = [rounds[place * (len(rounds) - 1) // (SHOWN - 1)] for place in range(SHOWN)]
    draw(_figure(rows, arms, sorted(set(shown)), ranks), drawn, TITLE)
    return [*lines, "", picture(drawn, TITLE), ""]


def _shares(rows: Rows, arm: str, number: int, rank: int) -> list[float]:
    return list(_matching(rows, {"arm": arm, "round": str(number), "rank": str(rank)}))


def _matching(rows: Rows, cell: dict[str, str]) -> Iterator[float]:
    for row in rows.rows:
        if cell.items() <= row.items():
            yield float(row["share"])


def _figure(rows: Rows, arms: list[str], rounds: list[int], ranks: list[int]) -> StudyFigure:
    panels = [
        Panel(
            arm,
            "fraction of the energy",
            [
                Series(
                    f"after round {number}",
                    METHODS["hetlora"].variant(place)._replace(marker=MARKERS[place]),
                    {rank: _shares(rows, arm, number, rank) for rank in ranks},
                )
                for place, number in enumerate(rounds)
            ],
            places="rank",
            scale="log",
        )
        for arm in arms
    ]
    seeds = len({row["seed"] for row in rows.rows})
    return StudyFigure(panels, 2, seeds_note(seeds), shared=True, height=330)
