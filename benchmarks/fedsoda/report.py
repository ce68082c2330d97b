"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.fedsoda.cells import FEDOT
from benchmarks.fedsoda.studies import BY_ROUND, CHANCE, COSTS, DENSE, PERPLEXITIES, SCORES, Study
from benchmarks.reporting.looks import CHANCE as GUESSED
from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.paired_comparison import paired_table
from benchmarks.reporting.panels import (
    DASHED,
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

NAMES = {
    "loss": "loss, nats per token of the correct answer",
    "acc": "accuracy",
    "acc_norm": "accuracy by likelihood per character",
    "perplexity": "perplexity of the full model",
    "sub_model_perplexity": "perplexity of the sub-model",
    "megabytes_up": "MB up",
    "megabytes_down": "MB down",
    "megabytes_stored": "MB stored",
    "thousand_trained": "trained parameters, thousands",
    "cpu_seconds": "CPU seconds of the run",
}
HEADINGS = {"loss": "Loss", "acc": "Accuracy", "acc_norm": "Accuracy per character"}
UNITS = {
    "loss": "nats per token of the answer",
    "acc": "fraction of the items that are right",
    "acc_norm": "fraction of the items that are right",
}
DIGITS = {
    "megabytes_up": 2,
    "megabytes_down": 2,
    "megabytes_stored": 2,
    "thousand_trained": 1,
    "cpu_seconds": 0,
}


def write_report(study: Study, rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    seeds = sorted({row["seed"] for row in rows.rows})
    settings = ", ".join(f"{key} {value}" for key, value in conditions["settings"].items())
    lines = [
        f"# {study.title}",
        "",
        (
            f"Mean ± sample standard deviation over {len(seeds)} seeds. Model"
            f" `{conditions['model']['name']}`, {conditions['model']['parameters']:,} parameters;"
            f" {settings}. [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
        *(_of_rounds(rows) if study.by_round else _of_cells(study, rows)),
        picture(path, study.title),
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(lines))
    draw(_rounds_figure(rows) if study.by_round else _cells_figure(rows), path, study.title)


# ----- rows per run -------------------------------------------------------------------------------


def _of_cells(study: Study, rows: Rows) -> list[str]:
    lines = []
    places = _names(rows.rows, "place")
    for place in places:
        found = [row for row in rows.rows if row["place"] == place]
        lines += [f"## {place}", "", *_table(found, (*SCORES, *PERPLEXITIES)), ""]
        arms: dict[tuple[str, str], dict[str, float]] = {}
        for name in SCORES:
            for row in found:
                if row[name]:
                    arms.setdefault((row["arm"], name), {})[row["seed"]] = float(row[name])
        lines += paired_table(
            arms, study.pairs, [name for name in SCORES if _has(found, name)], place, digits=3
        )
    first = [row for row in rows.rows if row["place"] == places[0] and row["cpu_seconds"]]
    explained = (
        "Sums over all rounds, mean over clients. A client receives what it stores once, except"
        " with FedPETuning, whose clients have the model; `MB down` is everything else."
    )
    return [*lines, f"## Costs ({places[0]})", "", explained, "", *_table(first, COSTS), ""]


def _table(rows: Sequence[Row], figures: Sequence[str]) -> list[str]:
    """Return a table with a row per arm and a column per figure that has values."""
    shown = [name for name in figures if _has(rows, name)]
    lines = head_of([NAMES[name] for name in shown], numbers=True)
    for arm in _names(rows, "arm"):
        cells = (
            _cell([row[name] for row in rows if row["arm"] == arm and row[name]], name, arm)
            for name in shown
        )
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _has(rows: Sequence[Row], figure: str) -> bool:
    return any(row[figure] for row in rows)


def _names(rows: Sequence[Row], key: str) -> list[str]:
    """Return the names of arms or places, in order of measurement."""
    return list(dict.fromkeys(row[key] for row in rows))


def _cell(texts: Sequence[str], figure: str, arm: str) -> str:
    values = [float(text) for text in texts]
    constant = arm == CHANCE or len(set(values)) == 1
    return mean_and_spread(values[:1] if constant else values, DIGITS.get(figure, 3))


def _cells_figure(rows: Rows) -> StudyFigure:
    """Return a panel per score: by place, or a row per arm if there is one place."""
    by_place = len(_names(rows.rows, "place")) > 1
    panels = [_panel(rows, name, by_place) for name in SCORES if _has(rows.rows, name)]
    return StudyFigure(
        panels, len(panels), _seeds(rows), rows=not by_place, height=320 if by_place else 0
    )


def _panel(rows: Rows, name: str, by_place: bool) -> Panel:
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows.rows:
        if row[name]:
            own = values.setdefault(row["arm"], {})
            own.setdefault(row["place"], []).append(float(row[name]))
    fixed = {
        arm: fmean(next(iter(values.pop(arm).values()))) for arm in (DENSE, CHANCE) if arm in values
    }
    if by_place:
        series = [Series(arm, look_of_arm(arm), own, False) for arm, own in values.items()]
    else:
        arms = {arm: found for arm, own in values.items() for found in own.values()}
        series = [Series("FedSODA", look_of_arm("FedSODA"), arms)]
    title = HEADINGS[name]
    references = [
        Reference(label, fixed[arm], look)
        for arm, label, look in ((DENSE, "dense model", DASHED), (CHANCE, "guessing", GUESSED))
        if arm in fixed
    ]
    # The losses of the dense model and of guessing would compress the axis.
    if name == BY_ROUND:
        references = []
        title += f" (dense model {fixed[DENSE]:.2f})" if DENSE in fixed else ""
    return Panel(title, UNITS[name], series, references)


# ----- rows per round -----------------------------------------------------------------------------


def _of_rounds(rows: Rows) -> list[str]:
    """Return a table of losses by round, and one of the rounds until FedOT's last loss, by seed."""
    curves = losses_by_seed(rows)
    numbers = sorted({number for curve in curves.values() for number in curve})
    lines = [
        f"## {NAMES[BY_ROUND]}",
        "",
        *head_of(list(map(str, numbers)), numbers=True, first="round"),
    ]
    arms = _names(rows.rows, "arm")
    for arm in arms:
        cells = [
            [
                curve[number]
                for (name, _), curve in curves.items()
                if name == arm and number in curve
            ]
            for number in numbers
        ]
        lines.append(
            f"| {arm} |"
            f" {' | '.join(f'{fmean(values):.3f}' if values else '' for values in cells)} |"
        )
    lines += [
        "",
        f"## Rounds until the final loss of {FEDOT}",
        "",
        *head_of([f"seed {seed}" for seed in _names(rows.rows, "seed")], numbers=True),
    ]
    for arm in arms:
        reached = [rounds_needed(curves, arm, seed) for seed in _names(rows.rows, "seed")]
        lines.append(
            f"| {arm} |"
            f" {' | '.join('not reached' if number is None else str(number) for number in reached)}"
            " |"
        )
    return [*lines, ""]


Curves = Mapping[tuple[str, str], Mapping[int, float]]


def losses_by_seed(rows: Rows) -> Curves:
    """Return the loss by round, by (arm, seed)."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows.rows:
        curves.setdefault((row["arm"], row["seed"]), {})[int(row["round"])] = float(row[BY_ROUND])
    return curves


def rounds_needed(curves: Curves, arm: str, seed: str, target: str = FEDOT) -> int | None:
    """Return the first round with a loss of at most the target's last one, or None."""
    aim = curves.get((target, seed))
    curve = curves.get((arm, seed), {})
    last = aim[max(aim)] if aim else float("-inf")
    return next((number for number in sorted(curve) if curve[number] <= last), None)


def _rounds_figure(rows: Rows) -> StudyFigure:
    curves = losses_by_seed(rows)
    series = []
    for arm in _names(rows.rows, "arm"):
        mine = [curve for (name, _), curve in curves.items() if name == arm]
        numbers = sorted({number for curve in mine for number in curve})
        points = {
            number: [curve[number] for curve in mine if number in curve] for number in numbers
        }
        series.append(Series(arm, look_of_arm(arm), points))
    panel = Panel("", f"loss, {UNITS[BY_ROUND]}", series, places="round")
    return StudyFigure([panel], 1, _seeds(rows), height=340)


def _seeds(rows: Rows) -> str:
    return seeds_note(len(_names(rows.rows, "seed")))
