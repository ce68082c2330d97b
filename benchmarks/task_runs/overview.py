"""One table and one plot of the federated LoRA methods over several studies of tasks.

``python -m benchmarks.reports DIRECTORY`` writes them from the CSV files of the studies that
``federated-lora.json`` lists, with the score that each of them is compared by.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.panels import (
    Panel,
    Reference,
    Series,
    StudyFigure,
    draw,
    picture,
    seeds_note,
)
from benchmarks.reporting.tables import head_of, mean_and_spread
from benchmarks.task_runs.arms import LORA
from benchmarks.task_runs.report import AXES, DENSE_MEAN
from benchmarks.task_runs.study import ALONE, DENSE
from espalier.amounts import count
from espalier.results.style import GREY, Look

TITLE = "Federated LoRA methods on SmolLM2-135M"
Values = dict[str, list[float]]
"""Values over seeds by arm."""


def write_report(path: Path, conditions: Mapping[str, Any]) -> None:
    """Write ``<path>.md`` and the figure ``<path>.svg``.

    Parameters
    ----------
    path : the study, a path without suffix; the studies' files are beside it
    conditions : ``studies``, each with ``name``, ``title``, ``figure`` (``loss`` or ``acc``),
        ``equal`` (``steps`` or ``bytes``) and, for equal bytes, ``dense_mean``: the study with
        equal steps that has the dense mean of the updates in as many rounds as FedPETuning. May
        have ``also``: arms that are not in the first study
    """
    studies = conditions["studies"]
    found = [_rows_of(path.with_name(f"{one['name']}.csv")) for one in studies]
    scores = [_values(rows, one["figure"]) for rows, one in zip(found, studies, strict=True)]
    # A later study may lack some of the first one's arms, or have them with fewer seeds.
    arms = [arm for arm in LORA if arm in scores[0] or arm in conditions.get("also", ())]
    numbers = [max(len(values.get(arm, [])) for arm in arms) for values in scores]
    seeds = max(numbers)
    studies = [
        {**one, "title": one["title"] + ("" if number == seeds else f" ({count(number, 'seed')})")}
        for one, number in zip(studies, numbers, strict=True)
    ]
    sent = _megabytes(found[0])
    heads = [f"{one['title']}: {_short(one['figure'])}" for one in studies]
    lines = [
        f"# {TITLE}",
        "",
        f"{seeds_note(seeds)}; a figure of fewer seeds says so. Loss: lower is better, accuracy:"
        " higher is better. The dense mean of the updates in the plot is that of FedEx-LoRA at"
        " equal steps, also where bytes are equal: it is the line to reach in as many rounds as"
        f" FedPETuning has.{_other_bases(path, studies)} The local baseline has FedPETuning's"
        " steps. MB are those of one client in both directions, in the run of"
        f" {studies[0]['title']}. Studies: "
        + ", ".join(f"[{one['title']}](./{one['name']}.md)" for one in studies)
        + ".",
        "",
        *head_of([*heads, "MB"], numbers=True),
    ]
    for arm in (DENSE, ALONE, *arms):
        cells = [
            _cell(values.get(arm, []), number)
            for values, number in zip(scores, numbers, strict=True)
        ]
        megabytes = f"{fmean(sent[arm]):.1f}" if arm in sent else ""
        lines.append(f"| {arm} | " + " | ".join([*cells, megabytes]) + " |")
    lines += ["", picture(path, TITLE), ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    upper = [
        _values(
            _rows_of(path.with_name(f"{one.get('dense_mean', one['name'])}.csv")), one["figure"]
        )
        for one in studies
    ]
    draw(_figure(studies, scores, upper, arms, seeds), path, TITLE)


def _other_bases(path: Path, studies: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence on panels whose frozen weights have another dtype than their line's."""

    def base_of(name: str) -> str:
        settings = json.loads(path.with_name(f"{name}.json").read_text())["settings"]
        return str(settings.get("training.base", "float32"))

    told = [
        f"{one['title']} ({base_of(one['name'])}, line {base_of(one['dense_mean'])})"
        for one in studies
        if "dense_mean" in one and base_of(one["name"]) != base_of(one["dense_mean"])
    ]
    return (
        f" The frozen weights have another dtype than those of the line in {', '.join(told)}."
        if told
        else ""
    )


def _cell(values: Sequence[float], seeds: int) -> str:
    """Return mean and deviation, and the number of values in brackets if it is not ``seeds``.

    Values that are all equal, as the base's are, have no deviation.
    """
    if not values:
        return ""
    cell = mean_and_spread(values if len(set(values)) > 1 else values[:1], 3)
    return cell if len(values) == seeds else f"{cell} ({len(values)})"


def _short(figure: str) -> str:
    return "accuracy" if figure == "acc" else "loss"


def _rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _values(rows: Sequence[Mapping[str, str]], figure: str) -> Values:
    found: Values = {}
    for row in rows:
        if row[figure]:
            found.setdefault(row["arm"], []).append(float(row[figure]))
    return found


def _megabytes(rows: Sequence[Mapping[str, str]]) -> Values:
    """Return the MB of one client in both directions."""
    up, down = (_values(rows, f"megabytes_{way}") for way in ("up", "down"))
    return {arm: [fmean(up[arm]) + fmean(down[arm])] for arm in up}


def _figure(
    studies: Sequence[Mapping[str, str]],
    scores: Sequence[Values],
    upper: Sequence[Values],
    arms: Sequence[str],
    seeds: int,
) -> StudyFigure:
    """Return the figure: a panel for each study, a row for each of these methods.

    ``upper`` has the scores of the dense mean in FedPETuning's rounds, for each study.
    """
    looks = {arm: look_of_arm(arm) for arm in arms}
    panels = []
    for one, values, full in zip(studies, scores, upper, strict=True):
        dense_mean, label, dashes = DENSE_MEAN
        lines = [(values.get(ALONE), "local baseline", ":"), (full.get(dense_mean), label, dashes)]
        panels.append(
            Panel(
                one["title"],
                AXES[one["figure"]],
                [Series("", looks, {arm: values[arm] for arm in arms if arm in values})],
                [
                    Reference(label, fmean(line), Look(GREY, "", dashes))
                    for line, label, dashes in lines
                    if line
                ],
            )
        )
    fewer = any(len(own[arm]) < seeds for own in scores for arm in arms if arm in own)
    short = sum(0 < len(values.get(ALONE, ())) < seeds for values in scores)
    note = seeds_note(seeds, fewer)
    if short:
        note += f"; the local baselines of {count(short, 'panel')} are of fewer seeds"
    return StudyFigure(panels, 2, note, rows=True, seeds=seeds)
