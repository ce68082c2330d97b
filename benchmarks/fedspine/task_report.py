"""Report of the task study: Markdown tables and plots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.fedspine import cuts, task_bars
from benchmarks.fedspine.compared import AT_ONCE_FIRST, AT_ONCE_LAST, BANDIT, CHOICES, UNPRUNED
from benchmarks.fedspine.tasks import (
    BY_SAMPLES,
    FLEET,
    GRID,
    KEYS,
    MANY_FLEET,
    SCHEDULE,
    TUNED,
    Files,
)
from benchmarks.reporting.paired import Pair, paired_table
from benchmarks.reporting.rows import Row

METHODS = (*UNPRUNED, *CHOICES, *BY_SAMPLES, cuts.FIRST, *cuts.LAST, AT_ONCE_FIRST, AT_ONCE_LAST)
UNPRUNED_SHARE = "0.0"
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


@dataclass(frozen=True)
class Found:
    """Measurements of the study, and functions that interpret them."""

    rows: Sequence[Row]
    curves: Sequence[Row]
    metric: str
    devices: Sequence[Row] = ()

    def better(self, scores: Sequence[float]) -> float:
        """Return the best of some scores."""
        return min(scores) if self.metric == "loss" else max(scores)

    def reaches(self, score: float, target: float) -> bool:
        """Return whether a score is at least as good as the target."""
        return score <= target if self.metric == "loss" else score >= target

    def groups(self) -> list[tuple[str, str]]:
        """Return the pairs of fleet and pruning ratio that have rows with pruning."""
        return list(
            dict.fromkeys(
                (row["fleet"], row["share"]) for row in self.rows if row["share"] != UNPRUNED_SHARE
            )
        )

    def of_group(self, rows: Sequence[Row], fleet: str, share: str) -> list[Row]:
        """Return the rows of a fleet and ratio, and those of the fleet without pruning."""
        return [
            row for row in rows if row["fleet"] == fleet and row["share"] in (share, UNPRUNED_SHARE)
        ]

    def targets(self, fleet: str, share: str) -> dict[str, float]:
        """Return, by seed, the score that all methods reach: the worst of their best scores.

        Only methods that were measured with every seed count. Rows that vary steps or ranks do not
        count.
        """
        best: dict[str, dict[str, list[float]]] = {}
        for row in self.of_group(self.curves, fleet, share):
            if row["model"] in METHODS:
                best.setdefault(row["seed"], {}).setdefault(row["model"], []).append(
                    float(row["score"])
                )
        best = {seed: own for seed, own in best.items() if BANDIT in own}
        everywhere = set(METHODS).intersection(*best.values())
        worst_of = max if self.metric == "loss" else min
        return {
            seed: worst_of(self.better(own[model]) for model in everywhere)
            for seed, own in best.items()
        }

    def seconds_to(self, fleet: str, share: str, model: str) -> dict[str, float]:
        """Return, by seed, the virtual seconds until a model first reaches the target.

        Only rounds with a measurement count.
        """
        found = {}
        for seed, target in self.targets(fleet, share).items():
            own = [
                row
                for row in self.of_group(self.curves, fleet, share)
                if (row["seed"], row["model"]) == (seed, model)
            ]
            if reached := [
                float(row["seconds"]) for row in own if self.reaches(float(row["score"]), target)
            ]:
                found[seed] = min(reached)
        return found


def write_report(title: str, found: Found, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
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
    lines += [*_varied(found), *_grid(found), *_ratios(found), f"![{title}](./{path.name}.png)", ""]
    if panels := _bars(found, conditions):
        lines += [f"![Bars](./{path.name}-bars.png)", ""]
        task_bars.plot(panels, f"{title}, seed 0", path.with_name(f"{path.name}-bars.png"))
    if any(row["model"].endswith(" rounds") for row in found.devices):
        lines += [f"![Devices](./{path.name}-devices.png)", ""]
        task_bars.plot_devices(
            found.devices, f"{title}, seed 0", path.with_name(f"{path.name}-devices.png")
        )
    path.with_suffix(".md").write_text("\n".join(lines))
    plot(title, found, path.with_suffix(".png"))


def _table(found: Found, fleet: str, share: str) -> list[str]:
    rows = found.of_group(found.rows, fleet, share)
    targets = found.targets(fleet, share)
    models = [model for model in dict.fromkeys(row["model"] for row in rows) if model in METHODS]
    # Of this ratio, only the grid was measured.
    if BANDIT not in models:
        return []
    lines = [
        f"## Fleet `{fleet}`, {float(share):.0%} pruned",
        "",
        *(
            [
                (
                    "All come to"
                    f" {', '.join(f'{target:.4g} (seed {seed})' for seed, target in targets.items())}."
                ),
                "",
            ]
            if targets
            else []
        ),
        f"{HEAD[0]} {task_bars.WHAT_ALL_COME_TO} |",
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


def _bars(found: Found, conditions: Mapping[str, Any]) -> dict[str, task_bars.Bars]:
    """Return the panels of the second plot.

    It shows ratios that were measured with more than one fleet or more than one alpha.
    """
    panels: dict[str, task_bars.Bars] = {}
    for share in dict.fromkeys(row["share"] for row in found.rows if row["model"] == BANDIT):
        fleets = task_bars.by_fleet(found.rows, found.curves, share, found.metric == "loss")
        alpha = conditions["settings"].get("data.alpha")
        alphas = task_bars.by_alpha(found.rows, FLEET, share, alpha) if alpha else {}
        panels |= {task_bars.WHAT_ALL_COME_TO: fleets} if fleets else {}
        panels |= {"accuracy, mean over devices": alphas} if alphas else {}
        times = (
            task_bars.times_by_alpha(found.curves, FLEET, share, alpha, found.metric == "loss")
            if alphas
            else {}
        )
        panels |= {task_bars.WITH_ALPHA: times} if times else {}
    return panels


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
            head = "| pruned | " + " | ".join(f"rank {rank}" for rank in ranks) + " |"
            lines += [
                f"## The same pruning ratio and rank for all: {words}",
                "",
                head,
                "|---|" + "---|" * len(ranks),
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
        f"| | {' | '.join(f'{float(share):.0%}' for share in shares)} |",
    ]
    lines.append("|---|" + "---|" * len(shares))
    for model, label in models.items():
        own = {
            row["share"]: row
            for row in found.rows
            if (row["model"], row["fleet"], row["seed"]) == (model, FLEET, "0")
        }
        lines.append(
            f"| {label} |"
            f" {' | '.join(_cell([own[share]], 'score') if share in own else '' for share in shares)} |"
        )
    return [*lines, ""]


def _cell(rows: Sequence[Row], figure: str) -> str:
    values = [float(row[figure]) for row in rows if row[figure]]
    if not values:
        return ""
    digits = 3 if figure in ("score", "worst", "pruned") else 2 if figure.startswith("mega") else 1
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def plot(title: str, found: Found, path: Path) -> None:
    """Plot the score over virtual seconds, a panel per fleet and ratio, a line per model.

    Values are means over seeds. Dashed lines are without pruning; dotted lines have fewer seeds
    than others.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(found)
    figure = Figure(figsize=(3.0 + 4.0 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    shown = [
        model
        for model in METHODS
        if any(row["model"] == model for rows in panels.values() for row in rows)
    ]
    colours = {model: colormaps["tab20"](place % 20) for place, model in enumerate(shown)}
    drawn: dict[str, Any] = {}
    every_axes = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axes, (head, rows) in zip(every_axes, panels.items(), strict=False):
        most = len({row["seed"] for row in rows})
        for model in (model for model in shown if any(row["model"] == model for row in rows)):
            times, scores = zip(*_line(rows, model), strict=True)
            seeds = len({row["seed"] for row in rows if row["model"] == model})
            style = "--" if model in UNPRUNED else "-" if seeds == most else ":"
            (drawn[model],) = axes.plot(
                times, scores, style, marker="o", markersize=3, linewidth=1, color=colours[model]
            )
        axes.set_xlabel("seconds of the fleet")
        axes.set_title(head)
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(
        drawn.values(), drawn.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8
    )
    figure.axes[0].set_ylabel(
        "loss, mean over devices" if found.metric == "loss" else "accuracy, mean over devices"
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _panels(found: Found) -> dict[str, list[Row]]:
    """Return the rows of each panel, by its heading.

    Runs with more rounds have panels of their own, under the plain names of their models.
    """
    groups = [group for group in found.groups() if found.targets(*group)]
    panels = {
        f"{fleet}, {float(share):.0%} pruned": found.of_group(found.curves, fleet, share)
        for fleet, share in groups
    }
    longer = [row for row in found.curves if row["model"].endswith(" rounds")]
    for ending in dict.fromkeys(row["model"].rpartition(", ")[2] for row in longer):
        own = [row for row in longer if row["model"].endswith(f", {ending}")]
        panels[f"{FLEET}, {ending}"] = [
            {**row, "model": row["model"].removesuffix(f", {ending}")} for row in own
        ]
    return panels


def _line(rows: Sequence[Row], model: str) -> Iterator[tuple[float, float]]:
    own = [row for row in rows if row["model"] == model]
    for number in sorted({int(row["round"]) for row in own}):
        points = [row for row in own if int(row["round"]) == number]
        yield (
            fmean(float(row["seconds"]) for row in points),
            fmean(float(row["score"]) for row in points),
        )


def found_in(files: Files, metric: str) -> Found:
    """Return the measurements in the study's files."""
    devices = files.devices().rows if files.devices_path.exists() else []
    rounds = str(files.rows.conditions["settings"]["federation.rounds"])
    return Found(
        files.rows.rows, [*files.curves.rows, *_ends(files.rows.rows, rounds)], metric, devices
    )


def _ends(rows: Sequence[Row], rounds: str) -> Iterator[Row]:
    """Yield the only point in the curves of models that are cut after the rounds."""
    for row in rows:
        if row["model"].startswith((AT_ONCE_LAST, *cuts.LAST)):
            yield {
                **{name: row[name] for name in (*KEYS, "seconds", "score", "worst")},
                "round": rounds,
            }
