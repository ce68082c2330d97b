"""Report of the task study: Markdown tables and plots."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.fedspine.tasks import figures as task_figures
from benchmarks.fedspine.tasks.compared_methods import AT_ONCE_FIRST, AT_ONCE_LAST, BANDIT
from benchmarks.fedspine.tasks.results import METHODS, Found
from benchmarks.fedspine.tasks.runs import FLEET, GRID, MANY_FLEET, SCHEDULE, TUNED
from benchmarks.reporting.paired_comparison import Pair, paired_table
from benchmarks.reporting.panels import draw, picture
from benchmarks.reporting.rows import Row
from benchmarks.reporting.tables import head_of, mean_and_spread

VARIED = {
    " steps": "Other numbers of steps in a round, as many in all (or as whole rounds allow)",
    " rounds": "More rounds, in which devices change their modes",
    ", alpha ": "Other distributions of the classes",
    " devices": "Many devices",
    TUNED: "Without LoRA: all weights, or the head alone, averaged by samples",
}
"""Headings of tables, by the part of a model name that marks the varied setting."""
COLUMNS = ("score", "worst", "pruned", "seconds", "waiting", "megabytes_up", "megabytes_down")
HEAD = (
    "| | score | worst | pruned | seconds | waiting | MB up | MB down |",
    "|---|---|---|---|---|---|---|---|",
)


def write_report(title: str, found: Found, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and the figures."""
    seeds = sorted({row["seed"] for row in found.rows})
    unit = (
        "nats per token of the answer"
        if found.metric == "loss"
        else "fraction of the items that are right"
    )
    of_devices = f"[devices](./{path.name}-devices.csv), " if found.devices else ""
    lines = [
        f"# {title}",
        "",
        (
            f"Scores are {unit} over {conditions['items']} test items; the mean over devices, each"
            " with its own model, and the worst of them. Means ± sample standard deviation over as"
            f" many of the seeds {', '.join(seeds)} as were measured. Seconds are the fleet's; the"
            " last column has those until the score that all methods come to which were measured"
            " with every seed (rounds in between were not measured, so they are coarse), with how"
            " many of a row's seeds came there, where not all did. Model"
            f" `{conditions['model']['name']}`, {conditions['model']['parameters']:,} parameters."
            f" [Figures](./{path.name}.csv), [between rounds](./{path.name}-curves.csv),"
            f" {of_devices}[conditions](./{path.name}.json)."
        ),
        "",
    ]
    for fleet, share in found.groups():
        lines += _table(found, fleet, share)
    lines += [*_varied(found), *_grid(found), *_ratios(found)]
    for ending, figure in task_figures.figures(found, conditions).items():
        drawn = path.with_name(f"{path.name}{ending}")
        lines += [picture(drawn, title), ""]
        draw(figure, drawn, title)
    path.with_suffix(".md").write_text("\n".join(lines))


def _table(found: Found, fleet: str, share: str) -> list[str]:
    rows = found.of_group(found.rows, fleet, share)
    targets = found.targets(fleet, share)
    models = [model for model in dict.fromkeys(row["model"] for row in rows) if model in METHODS]
    # Of this ratio, only the grid was measured.
    if BANDIT not in models:
        return []
    common = ", ".join(f"{target:.4g} (seed {seed})" for seed, target in targets.items())
    lines = [
        f"## Fleet `{fleet}`, {float(share):.0%} pruned",
        "",
        *([f"All come to {common}.", ""] if targets else []),
        f"{HEAD[0]} seconds to what all come to |",
        f"{HEAD[1]}---|",
    ]
    for model in models:
        own = [row for row in rows if row["model"] == model]
        soon = found.seconds_to(fleet, share, model)
        tried = len(targets.keys() & {row["seed"] for row in own})
        few = f" ({len(soon)} of {tried})" if len(soon) < tried else ""
        reached = f"{fmean(soon.values()):.3g}{few}" if soon else ""
        lines.append(f"{_line_of(model, own)} {reached} |")
    arms = {
        (model, "score"): {r["seed"]: float(r["score"]) for r in rows if r["model"] == model}
        for model in models
    }
    pairs = [Pair(BANDIT, model) for model in models if model != BANDIT]
    return [
        *lines,
        "",
        *(paired_table(arms, pairs, ["score"], "Score", 4) if _several(rows) else []),
    ]


def _line_of(model: str, rows: Sequence[Row]) -> str:
    return f"| {model} | {' | '.join(_cell(rows, name) for name in COLUMNS)} |"


def _varied(found: Found) -> Iterator[str]:
    """Yield the tables of rows that vary one setting."""
    for mark, head in VARIED.items():
        models = list(dict.fromkeys(row["model"] for row in found.rows if mark in row["model"]))
        if models:
            fleet = MANY_FLEET if mark == " devices" else FLEET
            yield from (f"## {head}, fleet `{fleet}`", "", *HEAD)
            yield from (
                _line_of(model, [row for row in found.rows if row["model"] == model])
                for model in models
            )
            yield ""


def _several(rows: Sequence[Row]) -> bool:
    return len({row["seed"] for row in rows}) > 1


def _grid(found: Found) -> list[str]:
    """Return tables of score and seconds by fixed ratio and rank."""
    ranks = list(dict.fromkeys(rank for _, rank in GRID))
    lines = []
    for name, words in (("score", "score"), ("seconds", "the fleet's seconds")):
        table = []
        for share in dict.fromkeys(f"{share:g}" for share, _ in GRID):
            own = [row for row in found.rows if (row["fleet"], row["share"]) == (FLEET, share)]
            cells = [
                _cell([row for row in own if row["model"] == f"{SCHEDULE}, rank {rank}"], name)
                for rank in ranks
            ]
            if any(cells):
                gone = fmean(
                    float(row["pruned"])
                    for row in own
                    if row["model"].startswith(f"{SCHEDULE}, rank ")
                )
                table.append(f"| {float(share):.0%} ({gone:.0%} went) | {' | '.join(cells)} |")
        if table:
            lines += [
                f"## The same pruning ratio and rank for all: {words}",
                "",
                *head_of([f"rank {rank}" for rank in ranks], first="pruned"),
                *table,
                "",
            ]
    return lines


def _ratios(found: Found) -> list[str]:
    """Return a table of scores by pruning ratio (figure 2b); seed 0.

    It has the methods with one ratio and rank for all devices.
    """
    models = {
        f"{SCHEDULE}, rank 8": SCHEDULE,
        "FedAPT": "FedAPT",
        AT_ONCE_FIRST: AT_ONCE_FIRST,
        AT_ONCE_LAST: AT_ONCE_LAST,
    }
    shares = sorted(
        {
            row["share"]
            for row in found.rows
            if row["model"] == AT_ONCE_FIRST and row["fleet"] == FLEET
        },
        key=float,
    )
    if len(shares) < 2:
        return []
    lines = [
        "## By pruning ratio: score, seed 0",
        "",
        *head_of([f"{float(share):.0%}" for share in shares]),
    ]
    for model, label in models.items():
        own = {
            row["share"]: row
            for row in found.rows
            if (row["model"], row["fleet"], row["seed"]) == (model, FLEET, "0")
        }
        scores = [_cell([own[share]], "score") if share in own else "" for share in shares]
        lines.append(f"| {label} | {' | '.join(scores)} |")
    return [*lines, ""]


def _cell(rows: Sequence[Row], figure: str) -> str:
    digits = 3 if figure in ("score", "worst", "pruned") else 2 if figure.startswith("mega") else 1
    return mean_and_spread([float(row[figure]) for row in rows if row[figure]], digits)
