"""Measurement of all arms on one task; every arm is a complete run of the app, or two."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from benchmarks.task_runs.arms import ARMS, Arm
from benchmarks.task_runs.energy import add_energy

KEYS = ("seed", "arm")
SCORES = ("loss", "acc", "acc_norm")
COSTS = ("megabytes_up", "megabytes_down", "million_parameters", "client_seconds")
FIGURES = (*SCORES, "perplexity", *COSTS)
DENSE = "dense"
CHANCE = "chance"
ALONE = "local baseline"
"""Row of FedPETuning's local baselines."""
PRUNING = (
    "num-clients",
    "model",
    "threads",
    "data.source",
    "evaluation.texts",
    "evaluation.centralized",
    "evaluation.local-baseline",
    "evaluation.max-samples",
    "evaluation.sequence-length",
)
"""Settings that a pruning run shares with the tuning runs."""
MEGA = 1e6


def measure_arms(
    bench: Bench,
    rows: Rows,
    public: str,
    names: Sequence[str],
    rounds: Mapping[str, int],
    energy: Rows,
) -> None:
    """Measure the arms that are missing, seed by seed.

    Parameters
    ----------
    bench : settings and folder of the runs
    rows : results; a row is added when its run has ended
    public : path of the text on which FedSODA's server aligns, and from which pruning takes samples
    names : arms to measure, in this order
    rounds : number of rounds of arms that do not have that of the settings
    energy : energy of each rank, of arms that report it; also of runs that exist
    """
    for seed in bench.seeds:
        for name in names:
            arm = ARMS[name]
            first = {"seed": seed, "arm": name, "round": 1, "rank": 1}
            lacks = arm.settings["method"] == "hetlora" and energy.missing(iter([first]))
            if not lacks and not rows.missing(iter([{"seed": seed, "arm": name}])):
                continue
            if name in rounds:
                arm = replace(arm, settings={**arm.settings, "federation.rounds": rounds[name]})
            runs = _runs(bench, seed, public, name, arm)
            add_energy(energy, seed, name, runs[-1])
            document = json.loads((runs[-1] / "summary.json").read_text())
            if not ARMS[name].first:
                _add(rows, seed, DENSE, _scores(document, "dense"))
                _add(rows, seed, CHANCE, _chances(document))
            alone = _scores(document, "local_baseline")
            if any(value is not None for value in alone.values()):
                _add(rows, seed, ALONE, alone)
            _add(rows, seed, name, {**_scores(document, "federated"), **_costs(runs)})


def _runs(bench: Bench, seed: int, public: str, name: str, arm: Arm) -> list[Path]:
    """Return the directories of an arm's runs; the second uses the first one's model."""
    varied = {**arm.settings, "seed": seed}
    made = list[Path]()
    if arm.first:
        kept = {key: value for key, value in bench.common.items() if key in PRUNING}
        first = {**kept, **arm.first, "seed": seed, "data.path": public}
        made.append(replace(bench, common={}).run(f"{seed}-{name}, pruned", first))
        varied["model"] = str(made[0])
    if arm.settings["method"] == "fedsoda":
        varied["public.text"] = public
    made.append(bench.run(f"{seed}-{name}", varied))
    return made


def _add(rows: Rows, seed: int, arm: str, values: dict[str, Any]) -> None:
    cell = {"seed": seed, "arm": arm}
    if rows.missing(iter([cell])):
        rows.add(cell, **{name: values.get(name) for name in FIGURES})


def _scores(document: dict[str, Any], model: str) -> dict[str, float | None]:
    return {metric["name"]: metric["values"][model] for metric in document["metrics"]}


def _chances(document: dict[str, Any]) -> dict[str, float | None]:
    return {metric["name"]: metric.get("chance") for metric in document["metrics"]}


def _costs(runs: Sequence[Path]) -> dict[str, float | None]:
    """Return the bytes per client and the seconds of all clients of both runs, and the size."""
    documents = [json.loads((run / "summary.json").read_text()) for run in runs]
    last = documents[-1]
    # An adapter is used with its base, which has the size of the dense model.
    is_adapter = last["size"]["federated"]["folder"] == "adapter"
    size = last["size"]["dense" if is_adapter else "federated"]["parameters"]
    return {
        **{
            f"megabytes_{way}": sum(
                document[f"bytes_{way}"] / len(document["clients"]) for document in documents
            )
            / MEGA
            for way in ("up", "down")
        },
        "million_parameters": size / MEGA,
        "client_seconds": sum(
            client["seconds"] for document in documents for client in document["clients"]
        ),
    }
