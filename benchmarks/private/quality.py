"""Perplexity of pooled pruning and FedPETuning at several epsilon.

Every cell is a complete run of the app. Without differential privacy, FedPETuning has as many
sequences in a step as a private run has on average, and pooled pruning has the usual samples.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.reporting.tables import head_of, mean_and_spread
from benchmarks.smaller.bench import SAMPLES, Bench
from espalier.data.passages import is_held_out, passages

EPSILONS = (inf, 8.0, 4.0, 2.0, 1.0)
DELTA = 1e-5
RATE = 0.0125
"""Sampling rate of training; sums have all records."""
ROUNDS = 3
STEPS = 10
SPARSITIES = (0.5, 0.6)
METHODS = ("pooled-pruning", "fedpetuning")
TITLE = "Differential privacy: quality at several epsilon"
KEYS = ("seed", "method", "epsilon", "text")
FIGURES = ("perplexity", "noise_multiplier")
DENSE = "dense"


def records_of(file: Path) -> int:
    """Return the number of records of a text file: its passages that are not held out."""
    found = set(passages(file.read_text(encoding="utf-8")))
    return sum(not is_held_out(passage) for passage in found)


def quality(bench: Bench, rows: Rows, chosen: Sequence[str] = METHODS) -> None:
    """Measure the perplexity of the chosen methods at all epsilons."""
    texts = [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]
    batch = max(1, round(RATE * min(records_of(file) for file in bench.private)))
    methods = {f"pooled pruning, {sparsity:.0%}": _pruning(sparsity) for sparsity in SPARSITIES}
    methods["FedPETuning"] = _tuning(batch)
    methods = {name: own for name, own in methods.items() if own["method"] in chosen}
    for seed, epsilon, (name, own) in product(bench.seeds, EPSILONS, methods.items()):
        cells = {
            "federated": {"seed": seed, "method": name, "epsilon": epsilon},
            "dense": {"seed": seed, "method": DENSE, "epsilon": inf},
        }
        wanted = [{**cell, "text": text} for cell in cells.values() for text in texts]
        if rows.missing(iter(wanted)):
            varied = {**_at(epsilon, own), "seed": seed}
            varied |= {"data.source": "files", "data.path": str(bench.dealt())}
            varied["num-clients"] = len(bench.private)
            folder = f"{seed}-{epsilon:g}-{name.replace(' ', '-').replace(',', '')}"
            _add(rows, cells, bench.run(folder, varied))


def _pruning(sparsity: float) -> dict[str, Any]:
    return {"method": "pooled-pruning", "pruning.sparsity": sparsity}


def _tuning(batch: int) -> dict[str, Any]:
    return {
        "method": "fedpetuning",
        "federation.rounds": ROUNDS,
        "federation.client-weights": "equal",
        "training.steps": STEPS,
        "training.batch-size": batch,
        "training.learning-rate": 2e-3,
        "training.schedule": "linear",
        "lora.rank": 2,
    }


def _at(epsilon: float, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's settings at an epsilon; private sums are made of all records."""
    samples = {"data.num-samples": SAMPLES} if chosen["method"] == "pooled-pruning" else {}
    if epsilon == inf:
        return {**chosen, **samples}
    rate = {} if samples else {"privacy.sampling-rate": RATE}
    noise = {"privacy.epsilon": epsilon, "privacy.delta": DELTA, "privacy.noise": "seed"}
    return {**chosen, **noise, **rate}


def _add(rows: Rows, cells: Mapping[str, dict[str, Any]], run: Path) -> None:
    """Record the models of a run."""
    document = json.loads((run / "summary.json").read_text())
    noise = (document["privacy"] or {"noise_multiplier": 0.0})["noise_multiplier"]
    for metric, (column, cell) in product(document["metrics"], cells.items()):
        found = {**cell, "text": metric["dataset"]}
        if rows.missing(iter([found])):
            figure = noise if column == "federated" else None
            rows.add(found, perplexity=metric["values"][column], noise_multiplier=figure)


def write_table(rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md``: perplexity by method and epsilon, one table for each text."""
    seeds = {row["seed"] for row in rows.rows}
    records = ", ".join(f"{number:,}" for number in conditions["records"].values())
    tuning = (
        f" FedPETuning: {ROUNDS} rounds of {STEPS} steps, each record with probability"
        f" {conditions['sampling_rate_of_training']:g} in a step."
        if any(row["method"] == "FedPETuning" for row in rows.rows)
        else ""
    )
    lines = [
        f"# {TITLE}",
        "",
        (
            f"Perplexity, mean ± sample standard deviation over {len(seeds)} seeds; lower is"
            f" better. Model `{conditions['model']['name']}`, {conditions['model']['weights']:,}"
            f" prunable weights; {len(conditions['records'])} clients with {records} records. A"
            f" record is one passage, of which a run uses at most {conditions['sequence_length']}"
            f" tokens. Delta is {conditions['delta']:g}.{tuning} Infinity: the usual run without"
            f" differential privacy. [Figures](./{path.name}.csv),"
            f" [conditions](./{path.name}.json)."
        ),
        "",
    ]
    for text in dict.fromkeys(row["text"] for row in rows.rows):
        own = [row for row in rows.rows if row["text"] == text]
        dense = {float(row["perplexity"]) for row in own if row["method"] == DENSE}
        lines += [f"## {text}", "", f"The dense model has {max(dense):.2f}.", ""]
        lines += head_of([f"epsilon {epsilon:g}" for epsilon in EPSILONS], numbers=True)
        for method in dict.fromkeys(row["method"] for row in own if row["method"] != DENSE):
            cells = [_cell(own, method, epsilon) for epsilon in EPSILONS]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    path.with_suffix(".md").write_text("\n".join(lines))


def _cell(rows: list[dict[str, str]], method: str, epsilon: float) -> str:
    values = [
        float(row["perplexity"])
        for row in rows
        if (row["method"], float(row["epsilon"])) == (method, epsilon)
    ]
    return mean_and_spread(values, 2)
