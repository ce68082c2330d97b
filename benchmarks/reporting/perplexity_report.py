"""Report of perplexities per text: tables and a figure, means over seeds, paired comparisons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.paired_comparison import Pair, paired_table
from benchmarks.reporting.panels import (
    DASHED,
    DOTTED,
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
from espalier.results.style import OTHER, Look

DENSE = "dense"
LOGARITHMIC = 3.5
"""Ratio of largest to smallest perplexity above which a panel has a logarithmic axis."""
FAR = 10
"""Multiple of the median above which a perplexity lies beyond the end of the axis."""
Figures = dict[tuple[str, str], list[Row]]


@dataclass(frozen=True)
class Study:
    """Study: columns that identify a row, measured columns, and the work."""

    title: str
    keys: tuple[str, ...]
    figures: tuple[str, ...]
    work: Callable[[Any, Rows], None]
    """Adds the missing rows; its first argument is the bench of the study."""
    pairs: tuple[Pair, ...] = ()
    """Rows of its table that are compared in pairs."""
    look: Look = OTHER
    """Look of models whose names begin with no known one."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Endings of names that share a row of the figure, and what the legend calls them."""
    drawn: tuple[str, ...] = ()
    """Sparsities that the figure shows; all if empty."""
    ordered: bool = False
    """True if the figure's rows are ordered by perplexity."""
    headings: Mapping[str, str] = field(default_factory=dict)
    """Headings of measured columns whose names do not say enough."""

    def heading(self, column: str) -> str:
        """Return the heading of a measured column."""
        return self.headings.get(column, column.replace("_", " "))


def write_report(study: Study, rows: Rows, conditions: Any, path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    seeds = sorted({row["seed"] for row in rows.rows})
    lines = [
        f"# {study.title}",
        "",
        (
            f"{of_seeds(len(seeds))} Model `{conditions['model']['name']}`,"
            f" {conditions['model']['weights']:,} prunable weights; {conditions['samples']}"
            f" calibration samples of {conditions['sequence_length']} tokens per client."
            f" [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
    ]
    texts = list(dict.fromkeys(row["text"] for row in rows.rows))
    for text in texts:
        lines += _table(
            study,
            rows,
            text,
            "perplexity",
            f"{text} ({conditions['texts'][text]['samples']} samples): perplexity",
        )
        lines += _paired(study, rows, text)
    for figure in study.figures[1:]:
        if _differs(study, rows, figure):
            for text in texts:
                lines += _table(study, rows, text, figure, f"{study.heading(figure)}, {text}")
        else:
            lines += _table(study, rows, texts[0], figure, study.heading(figure))
    path.with_suffix(".md").write_text("\n".join([*lines, picture(path, study.title), ""]))
    draw(_figure(study, rows, texts, len(seeds)), path, study.title)


def of_seeds(number: int) -> str:
    """Return what the figures of a study with this number of seeds are."""
    if number == 1:
        return "One seed."
    return f"Mean ± sample standard deviation over {number} seeds; a figure of fewer seeds says so."


def _differs(study: Study, rows: Rows, figure: str) -> bool:
    """Return True if a figure differs between texts: it is of a client, not of the whole run."""
    found: dict[tuple[str, ...], set[str]] = {}
    for row in rows.rows:
        found.setdefault(tuple(row[key] for key in study.keys if key != "text"), set()).add(
            row[figure]
        )
    return any(len(values) > 1 for values in found.values())


def _grouped(study: Study, rows: Rows, text: str) -> tuple[Figures, list[str], list[str]]:
    """Return rows by (table row, sparsity), and both names in order, the dense model first.

    The dense model has a single row, which is used for every sparsity.
    """
    grouped: Figures = {}
    for row in rows.rows:
        if row["text"] == text:
            names = [
                row[key] for key in study.keys if key not in ("seed", "sparsity", "text", "clients")
            ]
            if row.get("clients", "0") not in ("0", "1"):
                names.append(f"{row['clients']} clients")
            grouped.setdefault((", ".join(names), row["sparsity"]), []).append(row)
    models = list(dict.fromkeys(model for model, _ in grouped))
    return (
        grouped,
        sorted(models, key=lambda model: not model.startswith(DENSE)),
        sorted({sparsity for _, sparsity in grouped if float(sparsity)}, key=float),
    )


def _table(study: Study, rows: Rows, text: str, figure: str, title: str) -> list[str]:
    grouped, models, sparsities = _grouped(study, rows, text)
    seeds = len({row["seed"] for row in rows.rows})
    lines = [
        f"## {title}",
        "",
        *head_of([f"{float(s):.0%}" for s in sparsities]),
    ]
    for model in models:
        cells = [
            _cell(grouped.get((model, sparsity), grouped.get((model, "0.0"), [])), figure, seeds)
            for sparsity in sparsities
        ]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _paired(study: Study, rows: Rows, text: str) -> list[str]:
    grouped, _, sparsities = _grouped(study, rows, text)
    arms = {
        (model, f"{float(sparsity):.0%}"): {row["seed"]: float(row["perplexity"]) for row in found}
        for (model, sparsity), found in grouped.items()
    }
    return paired_table(
        arms, study.pairs, [f"{float(sparsity):.0%}" for sparsity in sparsities], text
    )


def _values(rows: Sequence[Row], figure: str) -> list[float]:
    """Return the values of a figure; models without it have an empty string."""
    return [float(row[figure]) for row in rows if row[figure]]


def _cell(rows: Sequence[Row], figure: str, seeds: int) -> str:
    """Return the mean of a figure; that of fewer seeds than the study has says so."""
    values = _values(rows, figure)
    if not values:
        return ""
    digits = 3 if figure == "sparsity_reached" else 2 if fmean(values) < 1000 else 0
    lacking = f" ({len(values)} of {seeds})" if len(values) < seeds else ""
    return f"{mean_and_spread(values, digits)}{lacking}"


def _figure(study: Study, rows: Rows, texts: Sequence[str], seeds: int) -> StudyFigure:
    """Return a panel per sparsity and text: a row per model, the dense model as a line."""
    of_texts = {text: _grouped(study, rows, text)[2] for text in texts}
    sparsities = sorted({one for found in of_texts.values() for one in found}, key=float)
    drawn = [sparsity for sparsity in sparsities if sparsity in study.drawn] or sparsities
    found = [
        _panel(study, rows, text, sparsity)
        for sparsity in drawn
        for text in texts
        if sparsity in of_texts[text]
    ]
    # A text that was measured with one sparsity only has no panel for the others.
    panels = [panel for panel in found if sum(len(one.values) for one in panel.series) > 1] or found
    columns = len(texts) if len(panels) == len(found) and len(texts) <= 3 else 2
    return StudyFigure(panels, columns, seeds_note(seeds), rows=True)


def _panel(study: Study, rows: Rows, text: str, sparsity: str) -> Panel:
    grouped, models, _ = _grouped(study, rows, text)
    values = {
        model: _values(grouped[model, sparsity], "perplexity")
        for model in models
        if (model, sparsity) in grouped and not model.startswith(DENSE)
    }
    references = [
        Reference(
            model.replace(DENSE, "dense model"), fmean(found), DASHED if model == DENSE else DOTTED
        )
        for model in models
        if model.startswith(DENSE)
        and (found := _values(grouped.get((model, "0.0"), []), "perplexity"))
    ]
    if study.ordered:
        values = dict(sorted(values.items(), key=lambda item: fmean(item[1])))
    # The names of other models have none of the endings.
    endings = {**study.variants, "": study.variants.get("", "")}
    by_ending: dict[str, dict[str, list[float]]] = {ending: {} for ending in endings}
    for model, found in values.items():
        ending = max((one for one in endings if model.endswith(one)), key=len)
        by_ending[ending][model.removesuffix(ending)] = found
    series = [
        Series(
            endings[ending],
            {name: look_of_arm(name, study.look).variant(number) for name in own},
            own,
        )
        for number, (ending, own) in enumerate(by_ending.items())
        if own
    ]
    means = [fmean(found) for found in values.values()]
    near = [mean for mean in means if mean < FAR * median(means)]
    wide = max(near, default=0) > LOGARITHMIC * min(near, default=0)
    return Panel(
        f"{text}: {float(sparsity):.0%} pruned",
        "perplexity (lower is better)",
        series,
        references,
        scale="log" if wide else "linear",
        end=None if len(near) == len(means) else 1.05 * max(near),
    )
