"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.paired_comparison import Pair, paired_table
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
from benchmarks.studies.cells import GROUPS, STRATEGIES, Cell
from benchmarks.studies.rows import Row, Rows
from espalier.results.style import METHODS

Label = Callable[[Cell], str]

TITLES = {
    "table-1": "Server comparison group, strategy and weight scaling (the paper's tables 1 to 3)",
    "table-4": "Local and server comparison group, one-shot, 50% (the paper's tables 4 and 8)",
    "figure-2": "64 to 2 clients with 128 calibration samples in total, 50% (the paper's figure 2)",
    "figure-3": "128 to 4 calibration samples, two per client, 50% (the paper's figure 3)",
}
LABELS: dict[str, tuple[Label, Label]] = {
    "table-1": (lambda cell: _model(cell), lambda cell: f"{cell.setting.sparsity:.0%}"),
    "table-4": (lambda cell: _model(cell), lambda cell: f"local: {cell.setting.local_group}"),
    "figure-2": (lambda cell: _model(cell), lambda cell: f"{cell.setting.clients} clients"),
    "figure-3": (
        lambda cell: _model(cell),
        lambda cell: f"{cell.setting.clients * cell.setting.samples} samples",
    ),
}
"""Functions that return the name of a row and of a column, by study."""
HEADINGS: dict[str, Label] = {
    "table-1": lambda cell: f"{cell.setting.sparsity:.0%} sparsity",
    "table-4": lambda cell: f"clients compare by {cell.setting.local_group}",
}
"""Functions that return what the panels of a figure with rows have in common, by study."""
CLIENTS = {
    "figure-2": "clients, 128 calibration samples in total",
    "figure-3": "clients, two calibration samples each",
}
"""Labels of the horizontal axis of figures with lines."""

PERPLEXITY = "perplexity (lower is better)"
BASELINES = {"local-baseline": "local baseline", "centralized": "centralized"}
"""Labels of the baselines in figures."""
AGAINST_BASELINES = tuple(
    Pair("layer, one-shot", baseline) for baseline in ("local-baseline", "centralized")
)
AGAINST_LAYER = tuple(Pair(f"{group}, one-shot", "layer, one-shot") for group in ("row", "column"))
ITERATIVE = tuple(
    Pair(f"{group}, iterative{scaled}", f"{group}, one-shot{scaled}")
    for group in GROUPS
    for scaled in ("", ", scaled")
)
SCALED = tuple(
    Pair(f"{group}, {how}, scaled", f"{group}, {how}") for group in GROUPS for how in STRATEGIES
)
PAIRS: dict[str, tuple[Pair, ...]] = {
    "table-1": (*AGAINST_BASELINES, *AGAINST_LAYER, *ITERATIVE, *SCALED),
    "table-4": (*AGAINST_BASELINES, *AGAINST_LAYER),
    "figure-2": AGAINST_BASELINES,
    "figure-3": AGAINST_BASELINES,
}
"""Rows that are compared in pairs, by study."""


def _model(cell: Cell) -> str:
    if not cell.server_group:
        return cell.method
    return f"{cell.server_group}, {cell.method}{', scaled' if cell.weight_scaling else ''}"


def write_report(study: str, rows: Rows, path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    path.with_suffix(".md").write_text(_markdown(study, rows, path))
    figure = _lines(study, rows) if study.startswith("figure") else _rows(study, rows)
    draw(figure, path, TITLES[study])


def _by_seed(study: str, rows: Rows, text: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the perplexity by seed, by (row, column)."""
    model, column = LABELS[study]
    arms: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.measured:
        if row.text == text:
            arms.setdefault((model(row.cell), column(row.cell)), {})[str(row.cell.setting.seed)] = (
                row.perplexity
            )
    return arms


def _markdown(study: str, rows: Rows, path: Path) -> str:
    name = path.name
    conditions: Any = rows.conditions
    seeds = sorted({row.cell.setting.seed for row in rows.measured})
    locals_asked = max(
        (row.models for row in rows.measured if row.cell.method == "local-baseline"), default=0
    )
    lines = [
        f"# {TITLES[study]}",
        "",
        (
            f"Perplexity: mean ± sample standard deviation over {len(seeds)} seeds. Model"
            f" `{conditions['model']['name']}`, {conditions['model']['weights']:,} prunable"
            f" weights; samples of {conditions['sequence_length']} tokens; ties by"
            f" {conditions['ties']}; `local-baseline` is the mean of up to {locals_asked} clients."
            f" [Figures](./{name}.csv), [conditions](./{name}.json)."
        ),
        "",
    ]
    for text in rows.texts():
        arms = _by_seed(study, rows, text)
        columns = list(dict.fromkeys(column for _, column in arms))
        lines += [f"## {text} ({conditions['texts'][text]['samples']} samples)", ""]
        lines += head_of(columns, first="model")
        for model in dict.fromkeys(model for model, _ in arms):
            cells = [_cell(list(arms.get((model, column), {}).values())) for column in columns]
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        lines += ["", *paired_table(arms, PAIRS[study], columns, text)]
    lines += [picture(path, TITLES[study]), ""]
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    return mean_and_spread(values, 2 if values and fmean(values) < 1000 else 0)


def _values(rows: Sequence[Row], **wanted: Any) -> list[float]:
    """Return the perplexities of rows whose cells have some values, in order of the seeds."""
    return [
        row.perplexity
        for row in rows
        if all(getattr(row.cell, key) == value for key, value in wanted.items())
    ]


def _seeds(rows: Rows) -> str:
    return seeds_note(len({row.cell.setting.seed for row in rows.measured}))


def _rows(study: str, rows: Rows) -> StudyFigure:
    """Return a panel per column of the tables and text: a row per federated model."""
    heading = HEADINGS[study]
    texts = rows.texts()
    panels = []
    for name in dict.fromkeys(heading(row.cell) for row in rows.measured):
        for text in texts:
            own = [row for row in rows.measured if row.text == text and heading(row.cell) == name]
            panels.append(_panel(f"{text}: {name}", own))
    return StudyFigure(panels, len(texts), _seeds(rows), rows=True)


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    series = []
    models = dict.fromkeys(
        (row.cell.server_group, row.cell.method) for row in rows if row.cell.server_group
    )
    for number, (scaled, label) in enumerate(
        ((False, "mean of the kept weights"), (True, "scaled"))
    ):
        found = {
            f"votes by {group}, {method}": values
            for group, method in models
            if (values := _values(rows, server_group=group, method=method, weight_scaling=scaled))
        }
        if found:
            series.append(Series(label, METHODS["fedprllm"].variant(number), found))
    references = [
        Reference(
            label, fmean(_values(rows, method=method)), look_of_arm(method).variant(number + 1)
        )
        for number, (method, label) in enumerate(BASELINES.items())
    ]
    return Panel(title, PERPLEXITY, series, references)


def _lines(study: str, rows: Rows) -> StudyFigure:
    """Return a panel per text: a line per model over the number of clients."""
    panels = []
    for text in rows.texts():
        own = [row for row in rows.measured if row.text == text]
        clients = dict.fromkeys(row.cell.setting.clients for row in own)
        series = [
            Series(
                {**BASELINES, "one-shot": "FedPrLLM (layer, one-shot)"}[method],
                look_of_arm(method, METHODS["fedprllm"]),
                {
                    f"{number}": _values(
                        [row for row in own if row.cell.setting.clients == number], method=method
                    )
                    for number in clients
                },
            )
            for method in (*BASELINES, "one-shot")
        ]
        dense = fmean(_values(own, method="dense"))
        panels.append(
            Panel(f"{text} (dense model {dense:.1f})", PERPLEXITY, series, places=CLIENTS[study])
        )
    return StudyFigure(panels, 2, _seeds(rows))
