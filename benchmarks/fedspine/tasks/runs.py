"""FedSpine on a task: scores of the devices' own models over virtual time, compared with LoRA.

A row is a run: a fleet, a pruning ratio, and the rule that chose ratios and ranks. ``score`` is the
mean over devices, each with its own smaller model on the common test items; ``worst`` is the worst
of them. The score is accuracy for tasks with options or classes, and nats per token of the answer
otherwise. The file ``-curves`` has the same scores between rounds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from benchmarks.fedspine.tasks import cuts, whole_tuning
from benchmarks.fedspine.tasks.compared_methods import (
    AT_ONCE_LAST,
    BANDIT,
    BY_IMPORTANCE,
    BY_LAYERS,
    CHOICES,
    UNPRUNED,
    at_once,
)
from benchmarks.fedspine.tasks.encoder_masks import mask_tuned
from benchmarks.fedspine.tasks.other_fleet import depends_on_times, retimed
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.fleet import Fleet
from strategies.fleet import fleet_of, seconds_of_all

KEYS = ("seed", "fleet", "share", "model")
FIGURES = ("score", "worst", "pruned", "seconds", "waiting", "megabytes_up", "megabytes_down")
CURVE_KEYS = (*KEYS, "round")
CURVE_FIGURES = ("seconds", "score", "worst")
DEVICE_KEYS = (*KEYS, "device")
DEVICE_FIGURES = ("seconds", "pruned", "rank")
"""Columns of a device: mean seconds of its rounds after the first, pruning ratio, last rank."""
DEVICES = 10
FLEET = "high"
SHARES = (0.3, 0.5)
SCHEDULE = "schedule"
WHOLE = "FedPETuning"
GRID = tuple(product((0.1, 0.3, 0.5), (2, 8, 32)))
"""Combinations of fixed pruning ratio and rank."""
STEPS = (20, 30, 40)
"""Numbers of steps in a round (tau).

The total is the same as elsewhere, as far as whole rounds allow.
"""
LONG = 3
"""Factor on the number of rounds of long runs; devices change their modes after 20 rounds."""
RATIOS = (0.1, 0.3)
"""Further pruning ratios at which methods are compared (figure 2b)."""
FLEETS = ("low", "medium")
MANY = 80
MANY_ROUNDS = 5
MANY_FLEET = "full"
ALPHAS = (1.0, 0.5, 0.1)
"""Concentrations of the class distributions."""
UNPRUNED_BANDIT = "bandits, nothing pruned (w/o A_P)"
UNEVEN = (BANDIT, SCHEDULE, "FedAPT", UNPRUNED_BANDIT)
SAMPLES = {"federation.client-weights": "samples"}
BY_SAMPLES = {
    f"{BANDIT}, weights by samples": SAMPLES,
    f"{UNPRUNED_BANDIT}, weights by samples": CHOICES[UNPRUNED_BANDIT] | SAMPLES,
}
"""Settings with client weights by samples, as in all other methods.

FedSpine's own weights are by importance.
"""
OF_UPDATES = {
    "FedPETuning, mean of updates": UNPRUNED["FedPETuning"] | {"fedpetuning.aggregation": "svd"}
}
"""Settings of FedSpine's mean without its weights, ranks and cuts."""
TUNED = "tuned: "
ALL_WEIGHTS_RATES = (1e-4, 3e-4)
"""Learning rates for all weights; the best one differs from that of LoRA."""
PARTS = (
    "methods",
    "once",
    "cuts",
    "grid",
    "ratios",
    "steps",
    "long",
    "fleets",
    "many",
    "alphas",
    "whole",
)
MEGA = 1e6
When = Literal["", "first", "last"]


@dataclass(frozen=True)
class Cell:
    """One run of the study."""

    fleet: str
    share: float
    """Pruning ratio; 0 if nothing is pruned."""
    model: str
    changes: Mapping[str, Any]
    cut: When = ""
    """Time at which LLM-Pruner cuts the common model, if it does."""
    whole: Literal["", "all", "head"] = ""
    """Part that is tuned without LoRA: all weights, or only the head."""

    @property
    def at_the_end(self) -> bool:
        """True if the model is cut after the rounds, so that earlier scores do not describe it."""
        return self.cut == "last" or self.model.startswith(AT_ONCE_LAST)

    def key(self, seed: int) -> dict[str, Any]:
        """Return the key of the cell's row."""
        return {"seed": seed, "fleet": self.fleet, "share": self.share, "model": self.model}


@dataclass(frozen=True)
class Files:
    """Files of the study."""

    rows: Rows
    curves: Rows

    def devices(self) -> Rows:
        """Return the file of devices; it is created if missing."""
        return Rows(self.devices_path, DEVICE_KEYS, DEVICE_FIGURES, self.rows.conditions)

    @property
    def devices_path(self) -> Path:
        """Path of the file of devices; it exists only if a run was FedSpine's."""
        return self.rows.path.with_name(f"{self.rows.path.stem}-devices.csv")


def cells(
    parts: Sequence[str], shares: Sequence[float], common: Mapping[str, Any]
) -> Iterator[Cell]:
    """Yield the runs of some parts; ``common`` has the settings of all runs."""
    once = at_once(common["federation.rounds"])
    yield from _compared(parts, shares, once)
    yield from _longer(parts, shares, common)
    yield from _elsewhere(parts, shares, once)


def _compared(
    parts: Sequence[str], shares: Sequence[float], once: dict[str, dict[str, Any]]
) -> Iterator[Cell]:
    """Yield the runs that compare methods, pruning ratios and ranks."""
    if "methods" in parts:
        yield from _unpruned(FLEET)
        for share, (name, changes) in product(shares, (CHOICES | BY_SAMPLES).items()):
            yield _pruned(FLEET, share, name, changes)
    if "once" in parts:
        for share, (name, changes) in product(shares, once.items()):
            yield _pruned(FLEET, share, name, changes)
    if "ratios" in parts:
        rest = {**once, "FedAPT": CHOICES["FedAPT"]}
        for share, (name, changes) in product(RATIOS, rest.items()):
            yield _pruned(FLEET, share, name, changes)
    if "cuts" in parts:
        for share in shares:
            yield _shared(FLEET, cuts.FIRST, UNPRUNED[WHOLE], share, "first")
            yield from (_shared(FLEET, name, UNPRUNED[WHOLE], share, "last") for name in cuts.LAST)
    if "grid" in parts:
        for share, rank in GRID:
            yield _pruned(
                FLEET,
                share,
                f"{SCHEDULE}, rank {rank}",
                {**CHOICES[SCHEDULE], "fedspine.rank": rank, **_wide(rank)},
            )


def _longer(
    parts: Sequence[str], shares: Sequence[float], common: Mapping[str, Any]
) -> Iterator[Cell]:
    """Yield the runs with other numbers of steps and rounds."""
    if "steps" in parts:
        total = common["federation.rounds"] * common["training.steps"]
        for steps, name in product(STEPS, (BANDIT, SCHEDULE)):
            rounds = total // steps
            varied = {"training.steps": steps, "federation.rounds": rounds, "evaluation.every": 1}
            yield _pruned(FLEET, shares[-1], f"{name}, {steps} steps", CHOICES[name] | varied)
    if "long" in parts:
        rounds = LONG * common["federation.rounds"]
        varied = {
            "federation.rounds": rounds,
            "evaluation.every": LONG * common["evaluation.every"],
        }
        for name, changes in UNPRUNED.items():
            yield _shared(FLEET, f"{name}, {rounds} rounds", changes | varied)
        compared = {
            name: CHOICES[name] for name in (BANDIT, SCHEDULE, "chance", "FedAPT")
        } | at_once(rounds)
        for name, changes in compared.items():
            yield _pruned(FLEET, shares[-1], f"{name}, {rounds} rounds", varied | changes)


def _elsewhere(
    parts: Sequence[str], shares: Sequence[float], once: dict[str, dict[str, Any]]
) -> Iterator[Cell]:
    """Yield the runs with other fleets, data and trained weights."""
    if "fleets" in parts:
        for fleet in FLEETS:
            yield from _unpruned(fleet)
            for name, changes in (
                {name: CHOICES[name] for name in (BANDIT, SCHEDULE, "FedAPT")} | once
            ).items():
                yield _pruned(fleet, shares[-1], name, changes)
    if "alphas" in parts:
        for alpha in ALPHAS:
            for name, changes in (UNPRUNED | OF_UPDATES).items():
                yield _shared(FLEET, f"{name}, alpha {alpha:g}", {**changes, "data.alpha": alpha})
            for name, changes in {
                **{name: CHOICES[name] for name in UNEVEN},
                **BY_SAMPLES,
                **once,
            }.items():
                yield _pruned(
                    FLEET, shares[-1], f"{name}, alpha {alpha:g}", {**changes, "data.alpha": alpha}
                )
    if "whole" in parts:
        for rate in ALL_WEIGHTS_RATES:
            changes = {"method": "fedpetuning", "training.learning-rate": rate}
            yield Cell(FLEET, 0.0, f"{TUNED}all weights, rate {rate:g}", changes, whole="all")
        yield Cell(FLEET, 0.0, f"{TUNED}the head alone", {"method": "fedpetuning"}, whole="head")
    if "many" in parts:
        for name in (BANDIT, SCHEDULE):
            varied = {
                "num-clients": MANY,
                "federation.rounds": MANY_ROUNDS,
                "evaluation.every": MANY_ROUNDS,
            }
            yield _pruned(MANY_FLEET, shares[-1], f"{name}, {MANY} devices", CHOICES[name] | varied)


def _unpruned(fleet: str) -> Iterator[Cell]:
    for name, changes in UNPRUNED.items():
        yield _shared(fleet, name, changes)


def _shared(
    fleet: str, name: str, changes: Mapping[str, Any], share: float = 0.0, cut: When = ""
) -> Cell:
    """Return the cell of a model that all devices share."""
    return Cell(fleet, share, name, {**changes, "federation.fleet": fleet}, cut)


def _pruned(fleet: str, share: float, name: str, changes: Mapping[str, Any]) -> Cell:
    own: dict[str, Any] = {
        "method": "fedspine",
        "pruning.ratio": share,
        "federation.fleet": fleet,
        "pruning.keep-models": False,
        **BY_LAYERS,
        **BY_IMPORTANCE,
    }
    return Cell(fleet, share, name, {**own, **changes})


def _wide(rank: int) -> dict[str, Any]:
    """Return settings for ranks above the default one, with the same scaling."""
    return {"lora.rank": rank, "lora.alpha": 2.0 * rank} if rank > 8 else {}


def measure(
    bench: Bench, files: Files, wanted: Sequence[Cell], metric: str, calibration: Path | None = None
) -> None:
    """Do missing runs and record their results.

    Cuts by LLM-Pruner need ``calibration``, a public text.
    """
    for seed, cell in product(bench.seeds, wanted):
        if not files.rows.missing(iter([cell.key(seed)])):
            continue
        varied = {"num-clients": DEVICES, **cell.changes, "seed": seed}
        if cell.whole:
            _measure_whole(files, cell, seed, parse({**bench.common, **varied}), metric)
            continue
        if cell.cut == "first":
            assert calibration is not None
            varied["model"] = str(cuts.cut_model(bench, calibration, cell.share, seed) / "model")
        _measure_run(bench, files, cell, seed, varied, metric, calibration)


def _measure_run(
    bench: Bench,
    files: Files,
    cell: Cell,
    seed: int,
    varied: Mapping[str, Any],
    metric: str,
    calibration: Path | None,
) -> None:
    """Record the rows of a run of the app."""
    own = _at_the_usual_fleet(cell, parse({**bench.common, **varied}))
    run = bench.run(_folder(seed, own), {**varied, **own.changes, "seed": seed})
    looks = json.loads((run / "rounds.json").read_text())["rounds"]
    document = json.loads((run / "summary.json").read_text())
    times = {
        "seconds": document["virtual_seconds"],
        "waiting": document["report"]["waiting_seconds"],
    }
    if own is not cell:
        rounds = retimed(document, _fleet(own), _fleet(cell))
        times = {
            "seconds": seconds_of_all(rounds),
            "waiting": fmean(note.waiting_seconds for note in rounds),
        }
        looks = [{**look, "seconds": seconds_of_all(rounds[: look["round"]])} for look in looks]
    for row in _curve(looks, metric):
        key = {**cell.key(seed), "round": row["round"]}
        if not cell.at_the_end and files.curves.missing(iter([key])):
            files.curves.add(key, **{name: row[name] for name in CURVE_FIGURES})
    if own is cell and (of_devices := list(_by_device(run, cell.key(seed)))):
        files.devices().add_all(of_devices)
    clients = document["clients"]
    gone = [client["metrics"]["pruned"] for client in clients if "pruned" in client["metrics"]]
    pruned = fmean(gone) if gone else None
    sent = {
        f"megabytes_{way}": document[f"bytes_{way}"] / len(clients) / MEGA for way in ("up", "down")
    }
    last = own_scores(looks[-1], metric)
    if cell.cut == "last":
        cut_last, pruned = _score_cut_last(bench, cell, seed, run, metric, calibration)
        last = [cut_last]
    files.rows.add(
        cell.key(seed), score=fmean(last), worst=worst(last, metric), pruned=pruned, **times, **sent
    )


def _at_the_usual_fleet(cell: Cell, settings: RunSettings) -> Cell:
    """Return the cell whose run gives this cell's results.

    If times do not affect the run, that is the cell of the default fleet; otherwise it is the cell
    itself.
    """
    if cell.fleet not in FLEETS or depends_on_times(settings):
        return cell
    return replace(cell, fleet=FLEET, changes={**cell.changes, "federation.fleet": FLEET})


def _fleet(cell: Cell) -> Fleet:
    fleet = fleet_of(cell.fleet)
    assert fleet is not None
    return fleet


def _score_cut_last(
    bench: Bench, cell: Cell, seed: int, run: Path, metric: str, calibration: Path | None
) -> tuple[float, float | None]:
    """Return score and pruning ratio of a model that is cut after the rounds.

    A language model is cut by LLM-Pruner on public text (ratio None), an encoder by Mask Tuning on
    the devices' labelled items.
    """
    tuned = run / "model"
    settings = parse({**bench.common, "num-clients": DEVICES, **cell.changes, "seed": seed})
    if open_model(settings.model).family.kind == "encoder":
        made = mask_tuned(settings, tuned, cell.share, cuts.LAST[cell.model][1], metric)
        print(
            ", ".join(
                f"block {index}: {int((mask == 0).sum())} {kind}"
                for (index, kind), mask in made.masks.items()
            ),
            "go",
        )
        return made.score, made.pruned
    assert calibration is not None
    cut = cuts.cut_model(bench, calibration, cell.share, seed, cell.model, tuned)
    return cuts.score_of(bench, cut / "model", metric), None


def _measure_whole(files: Files, cell: Cell, seed: int, settings: RunSettings, metric: str) -> None:
    """Record the rows of a model that is tuned without LoRA.

    Nothing is stored in between, so an interrupted run starts again.
    """
    found = list(
        whole_tuning.looks(settings, cell.fleet, only_head=cell.whole == "head", metric=metric)
    )
    for look in found:
        key = {**cell.key(seed), "round": look.round}
        if files.curves.missing(iter([key])):
            files.curves.add(key, seconds=look.seconds, score=look.score, worst=look.score)
    last = found[-1]
    sent = {"megabytes_up": last.bytes_up / MEGA, "megabytes_down": last.bytes_down / MEGA}
    score = {"score": last.score, "worst": last.score, "pruned": None}
    files.rows.add(cell.key(seed), **score, seconds=last.seconds, waiting=last.waiting, **sent)


def _folder(seed: int, cell: Cell) -> str:
    """Return the folder name of a run; a cut after the rounds uses the run without pruning."""
    share, model = (0.0, WHOLE) if cell.cut == "last" else (cell.share, cell.model)
    return f"{seed}-{cell.fleet}-{share:g}-{model.replace('/', '')}"


def _curve(looks: Sequence[Mapping[str, Any]], metric: str) -> Iterator[dict[str, Any]]:
    for look in looks:
        own = own_scores(look, metric)
        yield {
            "round": look["round"],
            "seconds": look["seconds"],
            "score": fmean(own),
            "worst": worst(own, metric),
        }


def own_scores(look: Mapping[str, Any], metric: str) -> list[float]:
    """Return the score of each device's model, or of the common one."""
    scores = look["scores"][metric]
    return list(scores.values()) if isinstance(scores, Mapping) else [scores]


def worst(scores: Sequence[float], metric: str) -> float:
    """Return the worst score: the largest loss, or the smallest accuracy."""
    return max(scores) if metric == "loss" else min(scores)


def _by_device(
    run: Path, key: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield the rows of a run's devices; none if it was not FedSpine's."""
    path = run / "refinements.json"
    later = json.loads(path.read_text())["rounds"][1:] if path.exists() else []
    for device in sorted({device for note in later for device in note["devices"]}, key=int):
        own = [note["devices"][device] for note in later if device in note["devices"]]
        seconds = fmean(one["seconds"] for one in own)
        yield (
            {**key, "device": int(device)},
            {
                "seconds": seconds,
                "pruned": own[-1]["pruned"],
                "rank": own[-1]["rank"],
            },
        )
