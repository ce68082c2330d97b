"""Report of a task: a Markdown table, paired differences, and a plot of loss and bytes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.paired_comparison import BySeed, Pair, paired_table
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
from benchmarks.task_runs.arms import ARMS, BASE, LORA, Settings
from benchmarks.task_runs.energy import energy_section
from benchmarks.task_runs.study import ALONE, DENSE, FIGURES
from espalier.results.style import GREY, Look
from espalier.settings.keys import as_text

LABELS = {
    "loss": "loss, nats per answer token",
    "acc": "accuracy",
    "acc_norm": "accuracy by likelihood per character",
    "perplexity": "perplexity of public text",
    "megabytes_up": "MB up",
    "megabytes_down": "MB down",
    "million_parameters": "million parameters",
    "client_seconds": "seconds of all clients",
}
AXES = {
    "loss": "loss, nats per answer token\n(lower is better)",
    "acc": "accuracy\n(higher is better)",
}
"""Labels of scores in figures."""
LINES = (
    (DENSE, "dense", "--"),
    (ALONE, "local baseline", ":"),
)
"""Arms that are lines, with labels and styles."""
DENSE_MEAN = ("FedEx-LoRA", "dense mean of the updates (FedEx-LoRA)", "-.")
"""Line at equal steps; with equal bytes this arm has fewer steps than others.

The plot of all studies has the line at equal steps in the panels of equal bytes too.
"""
PAIRS = (
    *(Pair(name, BASE) for name in (ALONE, "HetLoRA", "FedSODA", "FedOT", "FedBiOT")),
    *(Pair(name, BASE) for name in LORA if name not in (BASE, "HetLoRA")),
    *(
        Pair(name, "HetLoRA")
        for name in ("HetLoRA, svd", "raFLoRA, zero-pad", "FLoRA", "HetLoRA, by samples")
    ),
    Pair("raFLoRA, by samples", "HetLoRA, by samples"),
    Pair("raFLoRA, by samples", "HetLoRA, by samples, unlimited"),
    Pair("raFLoRA, by samples, limited", "HetLoRA, by samples"),
    Pair("raFLoRA", "HetLoRA, svd"),
    *(Pair(f"Fed-SB, rank 64{rate}", "Fed-SB") for rate in ("", ", rate 0.003")),
    *(
        Pair(name, "FedSODA")
        for name in (
            "FedOT",
            "FedBiOT",
            "FedSODA, never aligned",
            "FedSODA, aligned before",
            "FedSODA, aligned between",
        )
    ),
    *(
        Pair(f"{name}, {ratio}", f"LLM-Pruner, FedPETuning, {ratio}")
        for ratio in ("20%", "50%")
        for name in ("SFT-P", "FedSpine")
    ),
    *(
        Pair(f"FedSpine, schedule, {name}, {ratio}", f"FedSpine, schedule, {ratio}")
        for ratio in ("20%", "50%")
        for name in ("all compete", "masks")
    ),
    *(
        Pair(f"FedSpine, {name}, {ratio}", f"FedSpine, importance, {ratio}")
        for ratio in ("0%", "20%")
        for name in ("samples", "importance-samples")
    ),
)


def write_report(
    task: str, rows: Rows, conditions: dict[str, Any], path: Path, equal: str = "steps"
) -> None:
    """Write ``<path>.md``, and the figure."""
    arms = dict.fromkeys(row["arm"] for row in rows.rows)
    shown = [figure for figure in FIGURES if any(row[figure] for row in rows.rows)]
    seeds = len({row["seed"] for row in rows.rows})
    lines = [
        f"# Tuning methods on {task}",
        "",
        (
            f"{seeds_note(seeds)}{'; a figure of fewer seeds says so' if seeds > 1 else ''}."
            f" Model `{conditions['model']['name']}`. [Figures](./{path.name}.csv),"
            f" [conditions](./{path.name}.json)."
        ),
        "",
        *head_of([LABELS[figure] for figure in shown], numbers=True),
    ]
    if "rounds" in conditions:
        told = ", ".join(f"{arm} {number}" for arm, number in conditions["rounds"].items())
        lines[4:4] = [f"Rounds in the bytes of {BASE}: {told}.", ""]
    for arm in arms:
        own = [row for row in rows.rows if row["arm"] == arm]
        cells = [_cell(own, figure, seeds) for figure in shown]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines.append("")
    scores = [figure for figure in ("loss", "acc") if figure in shown]
    by_seed: dict[tuple[str, str], BySeed] = {
        (arm, figure): {
            row["seed"]: float(row[figure])
            for row in rows.rows
            if row["arm"] == arm and row[figure]
        }
        for arm in arms
        for figure in scores
    }
    if seeds > 1:
        lines += paired_table(by_seed, PAIRS, scores, "score", digits=3)
    title = f"Tuning methods on {task}: loss and bytes, equal {equal}"
    lines += [picture(path, title), ""]
    lines += energy_section(path, conditions)
    lines += _settings_section(list(arms))
    path.with_suffix(".md").write_text("\n".join(lines))
    lines_drawn = LINES if "rounds" in conditions else (*LINES, DENSE_MEAN)
    draw(_figure(rows, lines_drawn), path, title)


def _settings_section(arms: Sequence[str]) -> list[str]:
    """Return the arms' own settings, which go before the common ones of the conditions."""
    lines = [
        "## Settings of the arms",
        "",
        "In place of, or in addition to, the settings of the conditions: those that an arm has of"
        " its own.",
        "",
        *head_of(["settings"]),
    ]
    for arm in arms:
        if arm in ARMS:
            first, own = ARMS[arm].first, _in_words(ARMS[arm].settings)
            told = f"after a run with {_in_words(first)}: {own}" if first else own
            lines.append(f"| {arm} | {told} |")
    return [*lines, ""]


def _in_words(settings: Settings) -> str:
    return ", ".join(f"`{key}={as_text(value)}`" for key, value in settings.items())


def _cell(rows: Sequence[Row], figure: str, seeds: int) -> str:
    values = [float(row[figure]) for row in rows if row[figure]]
    if not values:
        return ""
    digits = 3 if figure in ("loss", "acc", "acc_norm") else 1
    text = mean_and_spread(values, digits)
    return text if len(values) == seeds else f"{text} ({len(values)})"


def _figure(rows: Rows, lines: Sequence[tuple[str, str, str]]) -> StudyFigure:
    """Return the figure of scores and bytes, a row for each arm that sends something.

    ``lines`` are arms that are lines, with labels and styles. Uniform guessing is in the table; its
    loss is too far from those of a pretrained model.
    """
    sent: dict[str, list[float]] = {}
    for row in rows.rows:
        if row["megabytes_up"]:
            both_ways = float(row["megabytes_up"]) + float(row["megabytes_down"])
            sent.setdefault(row["arm"], []).append(both_ways)
    scores = {score: _by_arm(rows, score) for score in ("loss", "acc")}
    # Arms of equal loss stay in the order of their rows.
    arms = sorted(
        (arm for arm in sent if arm in scores["loss"]), key=lambda arm: fmean(scores["loss"][arm])
    )
    looks = {arm: look_of_arm(arm) for arm in arms}
    # A logarithmic axis has no place for a deviation that reaches below 0.
    above_zero = all(
        fmean(values) > stdev(values) for values in scores["loss"].values() if len(values) > 1
    )
    panels = [
        Panel(
            "",
            AXES[score],
            [Series("", looks, {arm: values[arm] for arm in arms if arm in values})],
            [
                Reference(label, fmean(values[arm]), Look(GREY, "", line))
                for arm, label, line in lines
                if arm in values
            ],
            # With labels as answers, tuning divides the loss by ten and more.
            scale="log" if score == "loss" and scores["acc"] and above_zero else "linear",
        )
        for score, values in scores.items()
        if values
    ]
    panels.append(
        Panel(
            "",
            "MB per client, both ways",
            [Series("", looks, {arm: sent[arm] for arm in arms})],
            scale="log",
        )
    )
    seeds = len({row["seed"] for row in rows.rows})
    fewer = any(
        len(values[arm]) < seeds for values in scores.values() for arm in arms if arm in values
    )
    note = seeds_note(seeds, fewer)
    return StudyFigure(panels, len(panels), note, rows=True, seeds=seeds)


def _by_arm(rows: Rows, figure: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows.rows:
        if row[figure]:
            found.setdefault(row["arm"], []).append(float(row[figure]))
    return found
