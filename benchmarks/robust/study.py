"""Runs with bad clients, and tables of their perplexity.

Every cell is a complete run of the app in this process. Its row is written when it ends, so that an
interrupted study continues after the last one.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.reporting.rows import Row, Rows
from benchmarks.robust.attacks import ADAPTERS, SUMS, VOTES, BadClient
from benchmarks.smaller.bench import Bench
from espalier.amounts import count
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from espalier.storage.atomic import write_bytes

CLIENTS = 8
TRIMMED = 2
"""Number of values that the trimmed mean leaves out at each end."""
RATIO = 0.25
"""Pruning ratio of methods that remove groups."""
KEYS = ("seed", "method", "attack", "bad", "rule", "text")
FIGURES = ("perplexity", "dropped")
NOBODY = "nobody"
"""Attack of runs without bad clients."""
RULES: dict[str, dict[str, Any]] = {
    "mean": {"federation.aggregation-rule": "mean"},
    "clipped mean": {"federation.aggregation-rule": "clipped-mean"},
    f"trimmed mean, {TRIMMED}": {
        "federation.aggregation-rule": "trimmed-mean",
        "federation.trimmed-clients": TRIMMED,
    },
    "median": {"federation.aggregation-rule": "median"},
}


@dataclass(frozen=True)
class Subject:
    """Method under attack."""

    attacks: Sequence[str]
    rules: Sequence[str]
    settings: dict[str, Any]


SUBJECTS: dict[str, Subject] = {
    "fedpetuning": Subject(
        tuple(ADAPTERS),
        tuple(RULES),
        {
            "federation.rounds": 4,
            "training.steps": 10,
            "training.batch-size": 4,
            "training.learning-rate": 5e-3,
            "lora.rank": 8,
        },
    ),
    "pooled-pruning": Subject(tuple(SUMS), tuple(RULES), {"pruning.sparsity": 0.5}),
    "fedprllm": Subject(
        VOTES,
        tuple(rule for rule in RULES if rule != "clipped mean"),
        {"pruning.sparsity": 0.5},
    ),
    "flap": Subject(tuple(SUMS), tuple(RULES), {"pruning.ratio": RATIO}),
    "llm-pruner": Subject(tuple(SUMS), ("mean", "clipped mean"), {"pruning.ratio": RATIO}),
}
"""Settings and attacks by method."""


@dataclass(frozen=True)
class Cell:
    """Run of the study."""

    seed: int
    method: str
    attack: str
    bad: int
    rule: str

    def folder(self) -> str:
        """Return the name of the run's folder."""
        return f"{self.seed}-{self.method}-{self.attack}-{self.bad}-{self.rule}"


def cells(seeds: Sequence[int], methods: Sequence[str], bad: Sequence[int]) -> Iterator[Cell]:
    """Yield the runs of a study: for each number of bad clients all attacks and rules."""
    for seed, number, method in product(seeds, sorted(set(bad)), methods):
        subject = SUBJECTS[method]
        for attack, rule in product(subject.attacks if number else (NOBODY,), subject.rules):
            yield Cell(seed, method, attack, number, rule)


def measure(bench: Bench, rows: Rows, chosen: Iterator[Cell], own: Mapping[str, Any]) -> None:
    """Do the missing runs; a run is removed when its rows are written.

    ``own`` are settings that take the place of the subjects'.
    """
    texts = [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]
    for cell in chosen:
        keys = [{**vars(cell), "text": text} for text in texts]
        if not rows.missing(iter(keys)):
            continue
        run = _run(bench, cell, own)
        document = json.loads((run / "summary.json").read_text())
        dropped = sum(client["status"] == "dropped" for client in document["clients"])
        perplexities = {one["dataset"]: one["values"] for one in document["metrics"]}
        rows.add_all(
            (key, {"perplexity": perplexities[key["text"]]["federated"], "dropped": dropped})
            for key in keys
        )
        shutil.rmtree(bench.work / cell.folder())


def _run(bench: Bench, cell: Cell, own: Mapping[str, Any]) -> Path:
    subject = SUBJECTS[cell.method]
    settings = {
        "method": cell.method,
        "seed": cell.seed,
        "num-clients": CLIENTS,
        **subject.settings,
        **own,
        **RULES[cell.rule],
    }
    run = parse({**bench.common, **settings})
    model = open_model(bench.model)
    # The last clients are bad, so that the seed deals the same text to all honest ones.
    tamper = {
        client: BadClient(cell.attack, run, model, client)
        for client in range(CLIENTS - cell.bad, CLIENTS)
    }
    return bench.run(cell.folder(), settings, tamper)


# ----- report -------------------------------------------------------------------------------------


def write_report(rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md``: for each method and text a table of rules and attacks."""
    write_bytes(path.with_suffix(".md"), "\n".join(_page(rows, conditions)).encode())


def _page(rows: Rows, conditions: Mapping[str, Any]) -> list[str]:
    seeds = len({row["seed"] for row in rows.rows})
    methods = {row["method"] for row in rows.rows}
    tuning = SUBJECTS["fedpetuning"].settings | conditions["set"]
    length = conditions["sequence_length"]
    amounts = [f"sequences of {length} tokens"]
    if "fedpetuning" in methods:
        rounds = tuning["federation.rounds"]
        amounts.append(f"tuning for {rounds} rounds of {tuning['training.steps']} steps")
    samples = f"with {conditions['samples']} calibration samples"
    if methods & {"pooled-pruning", "fedprllm"}:
        sparsity = conditions["set"].get("pruning.sparsity", 0.5)
        amounts.append(f"pruning to {sparsity:.0%} {samples}")
    if methods & {"flap", "llm-pruner"}:
        amounts.append(f"removal of {RATIO:.0%} of the parameters {samples}")
    lines = [
        "# Bad clients and aggregation rules",
        "",
        (
            f"Perplexity of the result, mean over {count(seeds, 'seed')} (± standard deviation, if"
            f" there are several). Model `{conditions['model']['name']}`, {CLIENTS} clients with"
            f" text of {conditions['source']}; {', '.join(amounts)}. In brackets how many clients"
            " the server dropped, because their reply broke its contract or training cannot make"
            " it. An empty cell was not measured."
        ),
        "",
    ]
    for method, text in dict.fromkeys((row["method"], row["text"]) for row in rows.rows):
        own = [row for row in rows.rows if (row["method"], row["text"]) == (method, text)]
        lines += _table(method, text, own)
    return lines


def _table(method: str, text: str, own: Sequence[Row]) -> list[str]:
    rules = SUBJECTS[method].rules
    lines = [
        f"## {method}, {text}",
        "",
        f"| bad clients | attack | {' | '.join(rules)} |",
        "|---|---|" + "---|" * len(rules),
    ]
    for bad, attack in dict.fromkeys((row["bad"], row["attack"]) for row in own):
        values = [
            _value([row for row in own if (row["bad"], row["attack"], row["rule"]) == key])
            for key in ((bad, attack, rule) for rule in rules)
        ]
        lines.append(f"| {bad} of {CLIENTS} | {attack} | {' | '.join(values)} |")
    return [*lines, ""]


def _value(found: Sequence[Row]) -> str:
    if not found:
        return ""
    values = [float(row["perplexity"]) for row in found]
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    dropped = max(int(float(row["dropped"])) for row in found)
    return f"{fmean(values):.2f}{spread}" + (f" ({dropped})" if dropped else "")
