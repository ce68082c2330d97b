"""Settings, budgets and texts that the studies of SFT-P share."""

from pathlib import Path
from typing import Any

from benchmarks.smaller.bench import Bench

SHARES = (0.2, 0.5)
KEYS = ("seed", "sparsity", "model", "text")
DENSE = "dense"
TRAINED = {
    "training.batch-size": 2, "training.learning-rate": 2e-3, "lora.targets": "all",
    "data.sequence-length": 128, "federation.rounds": 10, "training.steps": 20,
}  # fmt: skip
"""Settings that SFT-P and the tuning of all other methods share."""
MASKS = {"method": "sft-p", "sft-p.learning-rate": 3e-3, "evaluation.local-baseline": True}


def mixed(number: int) -> list[float]:
    """Return the pruning ratios of clients of which the first half prunes less."""
    few, many = SHARES
    return [few if client < number // 2 else many for client in range(number)]


def texts_of(bench: Bench) -> list[str]:
    """Return the evaluation texts, in the order of the clients with the same domain."""
    return [entry.partition("=")[0] for entry in bench.common["evaluation.texts"].split(",")]


def private_text(bench: Bench, seed: int) -> dict[str, Any]:
    """Return the settings of clients with these private texts."""
    path: Path = bench.dealt()
    return {
        "seed": seed,
        "num-clients": len(bench.private),
        "data.source": "files",
        "data.path": str(path),
    }
