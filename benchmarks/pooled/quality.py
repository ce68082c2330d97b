"""Pooled pruning next to FedPrLLM, FedSpaLLM, one party with all text, and one without the others.

Every cell is a complete run of the app. Runs are kept in the working directory, so that an
interrupted study continues there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import SAMPLES, Bench

SPARSITIES = (0.5, 0.6, 0.7)
PATTERN = "2:4"
ONE_PASS = "pooled, one dense pass"
BLOCKS = "pooled, block by block"
BY_ROW = "FedPrLLM by row"
METHODS: dict[str, dict[str, Any]] = {
    ONE_PASS: {"method": "pooled-pruning"},
    BLOCKS: {"method": "pooled-pruning", "pruning.strategy": "iterative"},
    "pooled, equal clients, block by block": {
        "method": "pooled-pruning", "pruning.strategy": "iterative",
        "pooled-pruning.weighting": "equal",
    },
    "pooled RIA, block by block": {
        "method": "pooled-pruning", "pruning.strategy": "iterative", "pruning.metric": "ria",
    },
    "FedPrLLM": {"method": "fedprllm"},
    "FedPrLLM, block by block": {"method": "fedprllm", "pruning.strategy": "iterative"},
    BY_ROW: {"method": "fedprllm", "fedprllm.vote-group": "row"},
    "FedSpaLLM": {"method": "fedspallm"},
    "FedSpaLLM, Wanda": {"method": "fedspallm", "fedspallm.local-method": "wanda"},
}  # fmt: skip
"""Settings by name."""
BASELINES = {"local_baseline": "local Wanda", "centralized": "centralized Wanda"}
"""Names of the baselines, which the run of ``BLOCKS`` makes."""
DENSE = "dense"
KEYS = ("seed", "sparsity", "model", "text")
FIGURES = ("perplexity", "megabytes_up", "megabytes_down")
MEGA = 1e6


def study(methods: Sequence[str]) -> Study:
    """Return the study of some methods, by their names in ``METHODS``."""
    return replace(STUDY, work=partial(quality, methods=methods))


def quality(bench: Bench, rows: Rows, methods: Sequence[str] = ()) -> None:
    """Measure perplexity per text and bytes per client, for some methods or all."""
    amounts = [(sparsity, "") for sparsity in SPARSITIES] + [(0.5, PATTERN)]
    for seed, (sparsity, pattern), name in product(bench.seeds, amounts, methods or METHODS):
        if pattern and name == BY_ROW:
            continue  # a pattern replaces the comparison group
        cells = dict(_cells(seed, sparsity, pattern, name))
        if not any(_missing(bench, rows, cell) for cell in cells.values()):
            continue
        folder = f"{seed}-{pattern.replace(':', 'of') or f'{sparsity:g}'}-{name}"
        _add(rows, cells, bench.run(folder, _settings(bench, seed, sparsity, pattern, name)))


def _cells(
    seed: int, sparsity: float, pattern: str, name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cells of a run by the column of its summary."""
    own = {"federated": name} | (BASELINES if name == BLOCKS else {})
    for column, model in own.items():
        shown = f"{model}, {pattern}" if pattern else model
        yield column, {"seed": seed, "sparsity": sparsity, "model": shown}
    yield DENSE, {"seed": seed, "sparsity": 0.0, "model": DENSE}


def _settings(bench: Bench, seed: int, sparsity: float, pattern: str, name: str) -> dict[str, Any]:
    chosen = METHODS[name]
    amount = {"pattern": pattern} if pattern else {"sparsity": sparsity}
    return {
        **chosen,
        **{f"pruning.{key}": value for key, value in amount.items()},
        "seed": seed,
        "num-clients": len(bench.private),
        "data.source": "files",
        "data.path": str(bench.dealt()),
        "data.num-samples": SAMPLES,
        "evaluation.local-baseline": name == BLOCKS,
        "evaluation.centralized": "auto" if name == BLOCKS else "off",
    }


def _missing(bench: Bench, rows: Rows, cell: dict[str, Any]) -> bool:
    texts = [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]
    return bool(rows.missing({**cell, "text": text} for text in texts))


def _add(rows: Rows, cells: dict[str, dict[str, Any]], run: Path) -> None:
    """Record the models of a run, and the bytes of the federated one."""
    document = json.loads((run / "summary.json").read_text())
    clients = len(document["clients"])
    for metric, (column, cell) in product(document["metrics"], cells.items()):
        found = {**cell, "text": metric["dataset"]}
        if not rows.missing(iter([found])):
            continue
        sent = column == "federated"
        rows.add(
            found,
            perplexity=metric["values"][column],
            megabytes_up=document["bytes_up"] / clients / MEGA if sent else None,
            megabytes_down=document["bytes_down"] / clients / MEGA if sent else None,
        )


def _pairs() -> Iterator[Pair]:
    for other in ("FedPrLLM", "FedPrLLM, block by block", "FedSpaLLM", *BASELINES.values()):
        yield Pair(BLOCKS, other)
    yield Pair(BLOCKS, ONE_PASS)
    yield Pair("pooled RIA, block by block", BLOCKS)


STUDY = Study(
    "Pooled pruning and the other methods of unstructured pruning",
    KEYS,
    FIGURES,
    quality,
    tuple(_pairs()),
    variants={f", {PATTERN}": f"{PATTERN} (half of the weights)", "": "no pattern"},
    ordered=True,
)
