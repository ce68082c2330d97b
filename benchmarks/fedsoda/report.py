"""Report of a study: Markdown tables and a plot, means over seeds, and paired comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.fedsoda.cells import FEDOT
from benchmarks.fedsoda.studies import BY_ROUND, CHANCE, COSTS, PERPLEXITIES, SCORES, Study
from benchmarks.reporting.paired import paired_table
from benchmarks.reporting.rows import Row, Rows

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
DIGITS = {
    "megabytes_up": 2,
    "megabytes_down": 2,
    "megabytes_stored": 2,
    "thousand_trained": 1,
    "cpu_seconds": 0,
}


def write_report(study: Study, rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
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
        f"![{study.title}](./{path.name}.png)",
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(lines))
    plot = _plot_rounds if study.by_round else _plot_cells
    plot(study.title, rows, path.with_suffix(".png"))


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
    lines = [f"| | {' | '.join(NAMES[name] for name in shown)} |", "|---|" + "---:|" * len(shown)]
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
    digits = DIGITS.get(figure, 3)
    if not values:
        return ""
    spread = (
        f" ± {stdev(values):.{digits}f}"
        if len(values) > 1 and arm != CHANCE and len(set(values)) > 1
        else ""
    )
    return f"{fmean(values):.{digits}f}{spread}"


def _plot_cells(title: str, rows: Rows, path: Path) -> None:
    """Plot scores as dots with the spread over seeds: by place, or by arm if there is one place."""
    figure = _figure(len(SCORES))
    places = _names(rows.rows, "place")
    arms = [arm for arm in _names(rows.rows, "arm") if arm != CHANCE]
    for axes, name in zip(figure.axes, SCORES, strict=True):
        for number, arm in enumerate(arms):
            found = [
                [
                    float(r[name])
                    for r in rows.rows
                    if (r["arm"], r["place"]) == (arm, place) and r[name]
                ]
                for place in places
            ]
            shift = 0.6 * (number + 0.5) / len(arms) - 0.3
            at = [
                place + shift if len(places) > 1 else float(number)
                for place, values in enumerate(found)
                if values
            ]
            means, spreads = (
                zip(*((fmean(v), stdev(v) if len(v) > 1 else 0.0) for v in found if v), strict=True)
                if any(found)
                else ((), ())
            )
            axes.errorbar(at, means, yerr=spreads, fmt="o", markersize=5, capsize=2, label=arm)
        chance = [float(row[name]) for row in rows.rows if row["arm"] == CHANCE and row[name]]
        # The loss of uniform guessing is far above all others and would compress the axis.
        if chance and name != "loss":
            axes.axhline(fmean(chance), color="grey", linestyle="--", linewidth=1, label=CHANCE)
        if len(places) > 1:
            axes.set_xticks(range(len(places)), places)
        else:
            axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right")
        axes.set_ylabel(NAMES[name])
        axes.grid(alpha=0.3)
    _save(figure, title, path)


# ----- rows per round -----------------------------------------------------------------------------


def _of_rounds(rows: Rows) -> list[str]:
    """Return a table of losses by round, and one of the rounds until FedOT's last loss, by seed."""
    curves = losses_by_seed(rows)
    numbers = sorted({number for curve in curves.values() for number in curve})
    lines = [
        f"## {NAMES[BY_ROUND]}",
        "",
        f"| round | {' | '.join(map(str, numbers))} |",
        "|---|" + "---:|" * len(numbers),
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
        f"| | {' | '.join(f'seed {s}' for s in _names(rows.rows, 'seed'))} |",
    ]
    lines.append("|---|" + "---:|" * len(_names(rows.rows, "seed")))
    for arm in arms:
        reached = [rounds_needed(curves, arm, seed) for seed in _names(rows.rows, "seed")]
        lines.append(
            f"| {arm} |"
            f" {' | '.join('not reached' if number is None else str(number) for number in reached)} |"
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


def _plot_rounds(title: str, rows: Rows, path: Path) -> None:
    figure = _figure(1)
    curves = losses_by_seed(rows)
    for arm in _names(rows.rows, "arm"):
        mine = [curve for (name, _), curve in curves.items() if name == arm]
        numbers = sorted({number for curve in mine for number in curve})
        means = [fmean(curve[number] for curve in mine if number in curve) for number in numbers]
        figure.axes[0].plot(numbers, means, "o-", markersize=4, label=arm)
    figure.axes[0].set_xlabel("round")
    figure.axes[0].set_ylabel(NAMES[BY_ROUND])
    figure.axes[0].grid(alpha=0.3)
    _save(figure, title, path)


def _figure(panels: int) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 4.5 * panels, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(1, panels, squeeze=False)
    return figure


def _save(figure: Any, title: str, path: Path) -> None:
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=120, metadata={"Software": None})
