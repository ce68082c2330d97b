"""How soon a common perplexity is reached by the fleet's clock: every run's models round by round, and their times.

FedSpine's runs say when each round was done. What a round of LoRA on a model that all share takes follows from the same
formulas, for each device with its own rank: what is computed and sent does not depend on the text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import exp, log
from pathlib import Path
from statistics import fmean

from benchmarks.fedspallm.rows import Row, Rows
from espalier.modeling.opened import open_model
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.fleet import Fleet
from espalier.settings.run import RunSettings
from espalier.wire.plan import ModelPlan
from espalier.wire.tuning import blob_specs, trained
from strategies.engine.virtual_clock import waiting_seconds
from strategies.methods.refining_time import fleet_of, virtual_seconds

KEYS = ("seed", "sparsity", "model", "round")
FIGURES = ("seconds", "perplexity", "worst")
TITLE = "FedSpine: perplexity by the fleet's clock"


def add_curve(rows: Rows, seed: int, share: float, name: str, run: Path, settings: RunSettings, fleet: Fleet) -> None:
    """Write down what a run with these settings measured between its rounds."""
    for number, seconds, own in _points(run, settings, fleet):
        cell = {"seed": seed, "sparsity": share, "model": name, "round": number}
        if rows.missing(iter([cell])):
            rows.add(cell, seconds=seconds, perplexity=fmean(own), worst=max(own))


def _points(run: Path, settings: RunSettings, fleet: Fleet) -> Iterator[tuple[int, float, list[float]]]:
    """Round, seconds until its end, and each device's perplexity, a geometric mean over the texts."""
    looks = json.loads((run / "rounds.json").read_text())["rounds"]
    of_all = [] if "seconds" in looks[0] else seconds_of_shared(settings, fleet)
    for look in looks:
        texts = list(look["perplexity"].values())
        of_devices = texts if isinstance(texts[0], Mapping) else [{"all": value} for value in texts]
        own = [exp(fmean(log(text[device]) for text in of_devices)) for device in of_devices[0]]
        yield look["round"], look["seconds"] if "seconds" in look else of_all[look["round"] - 1], own


def fleet_named(name: str) -> Fleet:
    """A fleet of ``conf/devices``."""
    fleet = fleet_of(name)
    assert fleet is not None
    return fleet


def seconds_of_shared(settings: RunSettings, fleet: Fleet) -> list[float]:
    """Seconds until each round's end of LoRA on a model that all share, every device in every round."""
    return list(accumulate(max(own) for own in _of_rounds(settings, fleet)))


def waiting_of_shared(settings: RunSettings, fleet: Fleet) -> float:
    """Seconds for which a device of the same waits in a round for the slowest, a mean over both (equation 1)."""
    return fmean(waiting_seconds(own) for own in _of_rounds(settings, fleet))


def _of_rounds(settings: RunSettings, fleet: Fleet) -> Iterator[list[float]]:
    """Each device's seconds, round by round."""
    plan = open_model(settings.model).plan
    for number in range(1, settings.federation.rounds + 1):
        yield [_of_device(settings, plan, fleet, client, number) for client in range(settings.num_clients)]


def _of_device(settings: RunSettings, plan: ModelPlan, fleet: Fleet, client: int, server_round: int) -> float:
    limit = settings.of(AdapterAveraging).rank_limit_of(client, settings.lora)
    adapters = trained(plan, settings, limit)
    up = sum(spec.num_bytes for blob in blob_specs(adapters, settings).values() for spec in blob.values())
    sent = up if server_round == 1 else 2 * up
    return virtual_seconds(fleet, settings, client, server_round, plan.num_parameters, adapters, sent)


def common_targets(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """By seed and share the perplexity that every run comes to: the worst of their best. Those without pruning count in all."""
    best: dict[tuple[str, str], dict[str, float]] = {}
    shares = sorted({row["sparsity"] for row in rows} - {"0.0"}) or ["0.0"]
    for row in rows:
        for share in [row["sparsity"]] if row["sparsity"] != "0.0" else shares:
            own = best.setdefault((row["seed"], share), {})
            own[row["model"]] = min(own.get(row["model"], float("inf")), float(row["perplexity"]))
    return {cell: max(own.values()) for cell, own in best.items()}


def seconds_to(rows: Sequence[Row], seed: str, share: str, model: str, target: float) -> float | None:
    """The fleet's seconds after which a run first is at the target, of those rounds that were measured; None: never."""
    own = [row for row in rows if (row["seed"], row["model"]) == (seed, model) and row["sparsity"] in (share, "0.0")]
    reached = [float(row["seconds"]) for row in own if float(row["perplexity"]) <= target]
    return min(reached) if reached else None


def write_curves(rows: Rows, path: Path) -> None:
    """Write ``<path>.md`` and ``<path>.png``."""
    targets, models = common_targets(rows.rows), list(dict.fromkeys(row["model"] for row in rows.rows))
    shares, seeds = sorted({share for _, share in targets}), sorted({seed for seed, _ in targets})
    lines = [
        f"# {TITLE}",
        "",
        "Seconds of the fleet's clock until the mean over devices, each with its own model, is at the perplexity that all come "
        f"to (geometric mean over the texts), means over {len(seeds)} seeds; rounds in between were not measured, so times are "
        f"coarse. [Figures](./{path.name}.csv), [conditions](./{path.name}.json).",
        "",
        "| | " + " | ".join(f"{float(share):.0%}" for share in shares) + " |",
        "|---|" + "---:|" * len(shares),
        "| *perplexity that all come to* | "
        + " | ".join(f"{fmean(targets[seed, share] for seed in seeds):.2f}" for share in shares)
        + " |",
    ]
    for model in models:
        texts = []
        for share in shares:
            found = [seconds_to(rows.rows, seed, share, model, targets[seed, share]) for seed in seeds]
            known = [value for value in found if value is not None]
            texts.append(f"{fmean(known):.3g}" if len(known) == len(seeds) else "")
        lines.append(f"| {model} | {' | '.join(texts)} |")
    path.with_suffix(".md").write_text("\n".join([*lines, "", f"![{TITLE}](./{path.name}.png)", ""]))
    _plot(rows.rows, shares, models, path.with_suffix(".png"))


def _plot(rows: Sequence[Row], shares: Sequence[str], models: Sequence[str], path: Path) -> None:
    """Perplexity over seconds, a panel per share and a line per model, means over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.0 + 4.5 * len(shares), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, share in zip(figure.subplots(1, len(shares), sharey=True, squeeze=False)[0], shares, strict=True):
        for model in models:
            own = [row for row in rows if row["model"] == model and row["sparsity"] in (share, "0.0")]
            rounds = sorted({int(row["round"]) for row in own})
            points = [[row for row in own if int(row["round"]) == number] for number in rounds]
            times = [fmean(float(row["seconds"]) for row in point) for point in points]
            values = [fmean(float(row["perplexity"]) for row in point) for point in points]
            axes.plot(times, values, marker="o", markersize=3, linewidth=1, label=model)
        axes.set_xlabel("seconds of the fleet")
        axes.set_xscale("log")
        axes.set_title(f"{float(share):.0%} pruned")
        axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.axes[0].set_ylabel("perplexity, mean over devices")
    figure.suptitle(TITLE, fontsize=10)
    figure.savefig(path, dpi=120, metadata={"Software": None})
