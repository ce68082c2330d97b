"""Figures of the task study: scores by seconds, all methods, fleets and alphas, and devices."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.fedspine.tasks.compared_methods import AT_ONCE_FIRST, AT_ONCE_LAST, BANDIT
from benchmarks.fedspine.tasks.fleets_and_alphas import (
    Values,
    by_alpha,
    by_fleet,
    times_by_alpha,
)
from benchmarks.fedspine.tasks.results import METHODS, Found
from benchmarks.fedspine.tasks.runs import FLEET, SCHEDULE
from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.panels import Panel, Series, StudyFigure
from benchmarks.reporting.rows import Row
from espalier.results.style import Look

SPINE = look_of_arm("FedSpine")
LOOKS = {
    BANDIT: SPINE,
    SCHEDULE: SPINE.variant(1),
    AT_ONCE_FIRST: SPINE.variant(2),
    AT_ONCE_LAST: SPINE.variant(3),
}
"""Looks of FedSpine and its variants; the names of other methods say which one they are."""
DRAWN = ("FedPETuning", "HetLoRA", BANDIT, SCHEDULE, "FedAPT", AT_ONCE_FIRST, AT_ONCE_LAST)
"""Methods that have lines; the figure of all methods has the others too."""
LABELS = {BANDIT: "FedSpine: bandits", SCHEDULE: "FedSpine: schedule"}
SECONDS = "seconds of the fleet"


def figures(found: Found, conditions: Mapping[str, Any]) -> dict[str, StudyFigure]:
    """Return the figures that the measurements allow, by the ending of their names."""
    made = {"": _curves(found), "-methods": _methods(found), "-fleets": _fleets(found, conditions)}
    devices = [
        row
        for row in found.devices
        if row["seed"] == "0" and row["fleet"] == FLEET and row["model"].endswith(" rounds")
    ]
    made["-devices"] = _devices(devices)
    return {ending: figure for ending, figure in made.items() if figure.panels}


def _look(model: str) -> Look:
    known = [name for name in LOOKS if model.startswith(name)]
    return LOOKS[max(known, key=len)] if known else look_of_arm(model, SPINE)


def _score(found: Found) -> str:
    return "loss, mean over devices" if found.metric == "loss" else "accuracy, mean over devices"


def _curves(found: Found) -> StudyFigure:
    """Return the score over virtual seconds, a panel per fleet and ratio, a line per method."""
    panels = []
    for head, rows in _groups(found).items():
        series = [
            Series(LABELS.get(model, model), _look(model), dict(_line(rows, model)))
            for model in DRAWN
            if any(row["model"] == model for row in rows)
        ]
        panels.append(Panel(head, _score(found), series, places=SECONDS))
    return StudyFigure(
        panels, 3 if len(panels) == 3 else min(2, len(panels) or 1), _seeds(found.rows), shared=True
    )


def _seeds(rows: Sequence[Row]) -> str:
    number = len({row["seed"] for row in rows})
    return "One seed" if number == 1 else f"Mean ± standard deviation over up to {number} seeds"


def _groups(found: Found) -> dict[str, list[Row]]:
    """Return the rows of each panel, by its heading.

    Runs with more rounds have panels of their own, under the plain names of their models.
    """
    groups = [group for group in found.groups() if found.targets(*group)]
    panels = {
        f"fleet {fleet}: {float(share):.0%} pruned": found.of_group(found.curves, fleet, share)
        for fleet, share in groups
    }
    longer = [row for row in found.curves if row["model"].endswith(" rounds")]
    for ending in dict.fromkeys(row["model"].rpartition(", ")[2] for row in longer):
        own = [row for row in longer if row["model"].endswith(f", {ending}")]
        panels[f"fleet {FLEET}: {ending}"] = [
            {**row, "model": row["model"].removesuffix(f", {ending}")} for row in own
        ]
    return panels


def _line(rows: Sequence[Row], model: str) -> Iterator[tuple[float, list[float]]]:
    """Yield the mean seconds until each measured round, and the scores of all seeds there."""
    own = [row for row in rows if row["model"] == model]
    for number in sorted({int(row["round"]) for row in own}):
        points = [row for row in own if int(row["round"]) == number]
        seconds = fmean(float(row["seconds"]) for row in points)
        yield seconds, [float(row["score"]) for row in points]


def _methods(found: Found) -> StudyFigure:
    """Return score and time of all methods, a row per method and a pair of panels per group."""
    panels = []
    for fleet, share in found.groups():
        rows = [row for row in found.of_group(found.rows, fleet, share) if row["model"] in METHODS]
        models = [model for model in METHODS if any(row["model"] == model for row in rows)]
        # The other figure already has all methods of this group.
        if BANDIT not in models or set(models) <= set(DRAWN):
            continue
        for figure, label in (("score", _score(found)), ("seconds", SECONDS)):
            values = {
                model: [float(row[figure]) for row in rows if row["model"] == model]
                for model in models
            }
            looks = {model: _look(model) for model in models}
            head = f"fleet {fleet}: {float(share):.0%} pruned"
            panels.append(Panel(head, label, [Series("", looks, values)]))
    return StudyFigure(panels, 2, _seeds(found.rows), rows=True)


def _fleets(found: Found, conditions: Mapping[str, Any]) -> StudyFigure:
    """Return ratios that were measured with more than one fleet or more than one alpha; seed 0."""
    of_loss = found.metric == "loss"
    alpha = conditions["settings"].get("data.alpha")
    panels = []
    for share in dict.fromkeys(row["share"] for row in found.rows if row["model"] == BANDIT):
        by_name = [
            ("seconds to a common score", by_fleet(found.rows, found.curves, share, of_loss))
        ]
        if alpha:
            scores = by_alpha(found.rows, FLEET, share, alpha)
            times = times_by_alpha(found.curves, FLEET, share, alpha, of_loss)
            by_name += [
                (_score(found), scores),
                ("seconds to a common score", times if scores else {}),
            ]
        panels += [
            _panel(label, values, None if label == _score(found) else 0.0)
            for label, values in by_name
            if values
        ]
    return StudyFigure(panels, max(1, len(panels)), "Seed 0", height=320)


def _panel(label: str, values: Values, start: float | None) -> Panel:
    by_alpha = any(group.startswith("alpha") for group in values)
    series = [
        Series(
            LABELS.get(model, model),
            _look(model),
            {
                group.removeprefix("alpha "): [own[model]]
                for group, own in values.items()
                if model in own
            },
        )
        for model in DRAWN
        if any(model in own for own in values.values())
    ]
    places = "alpha (smaller: less even classes)" if by_alpha else "heterogeneity of the fleet"
    return Panel("", label, series, places=places, start=start)


def _devices(rows: Sequence[Row]) -> StudyFigure:
    """Return the mean seconds of each device's round, a line per run, sorted by speed."""
    series = []
    for model in dict.fromkeys(row["model"] for row in rows):
        seconds = sorted(float(row["seconds"]) for row in rows if row["model"] == model)
        label = next(
            (LABELS[name] + model.removeprefix(name) for name in LABELS if model.startswith(name)),
            model,
        )
        series.append(
            Series(label, _look(model), {n: [value] for n, value in enumerate(seconds, 1)})
        )
    panel = Panel(
        "", "seconds of a round, mean", series, places="devices, the fastest first", start=0.0
    )
    return StudyFigure([panel] if series else [], 1, "Seed 0", height=300)
