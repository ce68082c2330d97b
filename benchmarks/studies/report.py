"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.reporting.paired import Pair, paired_table
from benchmarks.studies.cells import GROUPS, STRATEGIES, Cell
from benchmarks.studies.rows import Row, Rows

Label = Callable[[Cell], str]

TITLES = {
    "table-1": "Server comparison group, strategy and weight scaling (the paper's tables 1 to 3)",
    "table-4": "Local and server comparison group, one-shot, 50% (the paper's tables 4 and 8)",
    "figure-2": "64 to 2 clients with 128 calibration samples in total, 50% (the paper's figure 2)",
    "figure-3": "128 to 4 calibration samples, two per client, 50% (the paper's figure 3)",
}
LOG_SCALE_FROM = 5
"""Ratio of largest to smallest perplexity above which a plot has a logarithmic axis."""
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
    """Write ``<path>.md`` and ``<path>.png``."""
    path.with_suffix(".md").write_text(_markdown(study, rows, path.name))
    _plot(study, rows, path.with_suffix(".png"))


def _figures(
    study: str, rows: Rows, text: str
) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return mean perplexity over seeds, its spread and the mean sparsity, by (row, column)."""
    model, column = LABELS[study]
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows.rows:
        if row.text == text:
            grouped.setdefault((model(row.cell), column(row.cell)), []).append(row)
    return {
        key: (
            fmean(row.perplexity for row in found),
            stdev(row.perplexity for row in found) if len(found) > 1 else 0.0,
            fmean(row.achieved_sparsity for row in found),
        )
        for key, found in grouped.items()
    }


def _by_seed(study: str, rows: Rows, text: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the perplexity by seed, by (row, column)."""
    model, column = LABELS[study]
    arms: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.rows:
        if row.text == text:
            arms.setdefault((model(row.cell), column(row.cell)), {})[str(row.cell.setting.seed)] = (
                row.perplexity
            )
    return arms


def _names(keys: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    keys = list(keys)
    return list(dict.fromkeys(model for model, _ in keys)), list(
        dict.fromkeys(column for _, column in keys)
    )


def _markdown(study: str, rows: Rows, name: str) -> str:
    conditions: Any = rows.conditions
    seeds = sorted({row.cell.setting.seed for row in rows.rows})
    locals_asked = max(
        (row.models for row in rows.rows if row.cell.method == "local-baseline"), default=0
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
        figures = _figures(study, rows, text)
        models, columns = _names(figures)
        lines += [f"## {text} ({conditions['texts'][text]['samples']} samples)", ""]
        lines += ["| model | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for model in models:
            cells = [_cell(figures.get((model, column))) for column in columns]
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        lines += ["", *paired_table(_by_seed(study, rows, text), PAIRS[study], columns, text)]
    lines += [f"![{TITLES[study]}](./{name}.png)", ""]
    return "\n".join(lines)


def _cell(figures: tuple[float, float, float] | None) -> str:
    if figures is None:
        return ""
    mean, spread, _ = figures
    digits = 2 if mean < 1000 else 0
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def _plot(study: str, rows: Rows, path: Path) -> None:
    """Plot tables as dots per model with a color per column, and figures as lines per model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = rows.texts()
    figure = Figure(figsize=(6 * len(texts), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, text in zip(
        figure.subplots(1, len(texts), sharey=study.startswith("table"), squeeze=False)[0],
        texts,
        strict=True,
    ):
        figures = _figures(study, rows, text)
        (_dots if study.startswith("table") else _lines)(axes, figures)
        dense = [mean for (model, _), (mean, _, _) in figures.items() if model == "dense"]
        axes.set_title(f"{text}, dense {dense[0]:.2f}" if dense else text)
        axes.grid(alpha=0.3)
    figure.suptitle(TITLES[study], fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _dots(axes: Any, figures: dict[tuple[str, str], tuple[float, float, float]]) -> None:
    models, columns = _names(figures)
    for column in columns:
        found = [
            (place, figures[model, column])
            for place, model in enumerate(models)
            if (model, column) in figures
        ]
        means = [mean for _, (mean, _, _) in found]
        spreads = [spread for _, (_, spread, _) in found]
        axes.errorbar(
            means,
            [place for place, _ in found],
            xerr=spreads,
            fmt="o",
            markersize=5,
            capsize=2,
            label=column,
        )
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    if axes.get_xlim()[1] > LOG_SCALE_FROM * axes.get_xlim()[0]:
        axes.set_xscale("log")
    axes.set_xlabel("perplexity (lower is better)")
    axes.legend()


def _lines(axes: Any, figures: dict[tuple[str, str], tuple[float, float, float]]) -> None:
    models, columns = _names(figures)
    for model in (name for name in models if name != "dense"):
        means, spreads = ([figures[model, column][which] for column in columns] for which in (0, 1))
        axes.errorbar(
            range(len(columns)),
            means,
            yerr=spreads,
            marker="o",
            markersize=4,
            capsize=2,
            label=model,
        )
    axes.set_xticks(range(len(columns)), [column.split()[0] for column in columns])
    axes.set_xlabel(columns[0].split()[1])
    axes.set_ylabel("perplexity (lower is better)")
    axes.legend()
