"""Runs of methods that set weights to zero: perplexity per text, and bytes per client.

Every cell is a complete run of the app. Runs are kept in the working directory, so that an
interrupted study continues there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import SAMPLES, Bench

DENSE = "dense"
KEYS = ("seed", "sparsity", "model", "text")
FIGURES = ("perplexity", "megabytes_up", "megabytes_down")
MEGA = 1e6


@dataclass(frozen=True)
class MaskRun:
    """Run of one method with one seed and sparsity."""

    name: str
    settings: Mapping[str, Any]
    """Settings of the method, flat."""
    baselines: Mapping[str, str]
    """Names of the baselines that the run makes, by column of its summary."""
    seed: int
    sparsity: float
    pattern: str = ""
    """Pattern in place of the sparsity, for instance ``2:4``."""

    def cells(self) -> dict[str, dict[str, Any]]:
        """Return the cells of the run by the column of its summary."""
        found: dict[str, dict[str, Any]] = {}
        for column, model in {"federated": self.name, **self.baselines}.items():
            shown = f"{model}, {self.pattern}" if self.pattern else model
            found[column] = {"seed": self.seed, "sparsity": self.sparsity, "model": shown}
        return found | {DENSE: {"seed": self.seed, "sparsity": 0.0, "model": DENSE}}

    def folder(self) -> str:
        """Return the name of its folder."""
        amount = self.pattern.replace(":", "of") or f"{self.sparsity:g}"
        return f"{self.seed}-{amount}-{self.name}"


def measure(bench: Bench, rows: Rows, run: MaskRun) -> None:
    """Do a run and record its models, unless all of them are recorded."""
    if any(_missing(bench, rows, cell) for cell in run.cells().values()):
        _add(rows, run.cells(), bench.run(run.folder(), _settings(bench, run)))


def _settings(bench: Bench, run: MaskRun) -> dict[str, Any]:
    amount = {"pattern": run.pattern} if run.pattern else {"sparsity": run.sparsity}
    return {
        **run.settings,
        **{f"pruning.{key}": value for key, value in amount.items()},
        "seed": run.seed,
        "num-clients": len(bench.private),
        "data.source": "files",
        "data.path": str(bench.dealt()),
        "data.num-samples": SAMPLES,
        "evaluation.local-baseline": "local_baseline" in run.baselines,
        "evaluation.centralized": "auto" if "centralized" in run.baselines else "off",
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
