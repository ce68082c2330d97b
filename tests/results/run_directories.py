"""Run directories for tests: what a server writes, without a run."""

import json
from pathlib import Path
from typing import Any

import tomli_w

BASE = "a" * 64
OTHER_BASE = "b" * 64


def metric(
    dataset: str, federated: float | None, dense: float | None = 10.0, **others: Any
) -> dict[str, Any]:
    """Return an entry of ``metrics``: a perplexity, unless ``others`` say otherwise."""
    values = {"dense": dense, "local_baseline": None, "centralized": None, "federated": federated}
    entry = {"name": "perplexity", "dataset": dataset, "direction": "lower", "values": values}
    return entry | others


def save_run(folder: Path, settings: dict[str, Any] | None = None, **summary: Any) -> Path:
    """Write a run directory and return it; a key of ``summary`` replaces a default."""
    folder.mkdir(parents=True)
    before = Path((settings or {}).get("model", "demo"))
    maker = before.parent if before.name == "model" else before
    first = {"model": "base", "sha256": BASE, "run": None}
    own = {"model": before.name, "sha256": OTHER_BASE, "run": str(maker), "path": str(before)}
    document = {
        "base": [own, first] if before.is_absolute() else [first],
        "status": "completed",
        "reason": None,
        "method": "flap",
        "num_clients": 4,
        "finished": 4,
        "model": "base",
        "model_sha256": BASE,
        "metrics": [metric("wiki", 12.0)],
        "size": {
            "dense": {"parameters": 1000, "bytes": 4000, "folder": None},
            "federated": {"parameters": 800, "bytes": 3200, "folder": "model"},
        },
        "bytes_up": 70,
        "bytes_down": 30,
        "seconds": 5.0,
        "clients": [],
        "report": {},
        "test_items": None,
        "device": "cpu",
        "threads": 1,
        "seed": 0,
    }
    (folder / "summary.json").write_text(json.dumps(document | summary))
    (folder / "run.json").write_text("{}")
    evaluation = {"texts": "wiki=/w.txt", "sequence-length": 256, "max-samples": 8}
    chosen = {"method": "flap", "seed": 0, "model": "demo", "evaluation": evaluation}
    (folder / "settings.toml").write_text(tomli_w.dumps(chosen | (settings or {})))
    return folder
