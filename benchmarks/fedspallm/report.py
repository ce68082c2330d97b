"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.fedspallm.rows import Row, Rows
from benchmarks.fedspallm.studies import Study
from benchmarks.paired import paired_table

DENSE = "dense"
LOGARITHMIC = 20
"""Ratio of largest to smallest perplexity above which a plot has a logarithmic axis."""
Figures = dict[tuple[str, str], list[Row]]


def write_report(study: Study, rows: Rows, conditions: Any, path: Path) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
    seeds = sorted({row["seed"] for row in rows.rows})
    lines = [
        f"# {study.title}",
        "",
        (
            f"Mean ± sample standard deviation over {len(seeds)} seeds; a figure of fewer seeds"
            f" says so. Model `{conditions['model']['name']}`,"
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
                lines += _table(study, rows, text, figure, f"{figure.replace('_', ' ')}, {text}")
        else:
            lines += _table(study, rows, texts[0], figure, figure.replace("_", " "))
    path.with_suffix(".md").write_text(
        "\n".join([*lines, f"![{study.title}](./{path.name}.png)", ""])
    )
    _plot(study, rows, texts, path.with_suffix(".png"))


def _differs(study: Study, rows: Rows, figure: str) -> bool:
    """Return True if a figure differs between texts: it is of a client, not of the whole run."""
    found: dict[tuple[str, ...], set[str]] = {}
    for row in rows.rows:
        found.setdefault(tuple(row[key] for key in study.keys if key != "text"), set()).add(
            row[figure]
        )
    return any(len(values) > 1 for values in found.values())


def _grouped(study: Study, rows: Rows, text: str) -> tuple[Figures, list[str], list[str]]:
    """Return rows by (table row, sparsity), and both names in order.

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
        models,
        sorted({sparsity for _, sparsity in grouped if float(sparsity)}, key=float),
    )


def _table(study: Study, rows: Rows, text: str, figure: str, title: str) -> list[str]:
    grouped, models, sparsities = _grouped(study, rows, text)
    lines = [
        f"## {title}",
        "",
        "| | " + " | ".join(f"{float(s):.0%}" for s in sparsities) + " |",
        "|---|" + "---|" * len(sparsities),
    ]
    for model in models:
        cells = [
            _cell(grouped.get((model, sparsity), grouped.get((model, "0.0"), [])), figure)
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


def _cell(rows: Sequence[Row], figure: str) -> str:
    values = _values(rows, figure)
    if not values:
        return ""
    digits = 3 if figure == "sparsity_reached" else 2 if fmean(values) < 1000 else 0
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    lacking = f" ({len(values)} of {len(rows)})" if len(values) < len(rows) else ""
    return f"{fmean(values):.{digits}f}{spread}{lacking}"


def _plot(study: Study, rows: Rows, texts: Sequence[str], path: Path) -> None:
    """Plot perplexities as dots, a line per model and a color per sparsity."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = [model for model in _grouped(study, rows, texts[0])[1] if model != DENSE]
    figure = Figure(figsize=(2.5 + 4.5 * len(texts), 1.5 + 0.3 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, text in zip(
        figure.subplots(1, len(texts), sharey=True, squeeze=False)[0], texts, strict=True
    ):
        grouped, _, sparsities = _grouped(study, rows, text)
        dense = [
            value
            for (model, _), entry in grouped.items()
            if model == DENSE
            for value in _values(entry, "perplexity")
        ]
        if dense:
            axes.axvline(fmean(dense), color="grey", linestyle="--", linewidth=1, label=DENSE)
        for sparsity in sparsities:
            found = [
                (place, grouped[model, sparsity])
                for place, model in enumerate(models)
                if (model, sparsity) in grouped
            ]
            means = [fmean(_values(entry, "perplexity")) for _, entry in found]
            spreads = [
                stdev(values) if len(values := _values(entry, "perplexity")) > 1 else 0.0
                for _, entry in found
            ]
            places = [place for place, _ in found]
            axes.errorbar(
                means,
                places,
                xerr=spreads,
                fmt="o",
                markersize=5,
                capsize=2,
                label=f"{float(sparsity):.0%}",
            )
        axes.set_yticks(range(len(models)), models)
        axes.set_ylim(len(models) - 0.5, -0.5)
        figures = [value for entry in grouped.values() for value in _values(entry, "perplexity")]
        if max(figures) > LOGARITHMIC * min(figures):
            axes.set_xscale("log")
        axes.set_xlabel("perplexity (lower is better)")
        axes.set_title(text)
        axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(study.title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})
