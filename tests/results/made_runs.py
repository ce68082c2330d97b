"""Run directories as runs leave them, with tiny models; no run is started."""

import json
from pathlib import Path
from typing import Any

import tomli_w
import torch

from espalier.hf.export.adapter import export_adapter
from espalier.hf.export.model import export_edited
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.edits import Edits, dense
from espalier.hf.structured.export import export_structured
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import adapter_plan
from espalier.models.structure import Structure
from espalier.results.base_chain import chain_of
from espalier.settings.tables.lora import LoraSettings

METRIC = {
    "name": "perplexity", "dataset": "documentation", "direction": "lower",
    "values": {"dense": 12.5, "local_baseline": None, "centralized": None, "federated": 13.25},
}  # fmt: skip


def note(folder: Path, model: str, method: str, **changes: Any) -> None:
    """Write ``settings.toml``, ``run.json`` and ``summary.json`` of a completed run."""
    opened = open_model(model)
    summary = {
        "status": "completed",
        "reason": None,
        "finished": 2,
        "num_clients": 2,
        "seconds": 1.0,
        "method": method,
        "model": opened.directory.name,
        "model_revision": None,
        "model_sha256": opened.sha256,
        "base": [link.to_json() for link in chain_of(opened)],
        "metrics": [METRIC],
    }
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    (folder / "run.json").write_text("{}")
    settings = {"method": method, "model": model, "data": {"source": "hub", "path": "o/texts"}}
    (folder / "settings.toml").write_text(tomli_w.dumps(settings))


def pruned_run(folder: Path, base: Path, *, even: bool = False) -> Path:
    """Make a run that removed groups of a model, of each block others unless ``even``."""
    folder.mkdir(parents=True)
    model = OpenedModel(base)
    kept = {0: {"channels": list(range(8))}} | ({1: {"channels": list(range(8))}} if even else {})
    cut = OpenedModel(base, Structure.whole(model.plan).keeping(kept))
    export_structured(cut, dense, folder / "model", "compact", card="# base, pruned\n")
    note(folder, str(base), "flap")
    return folder


def tuned_run(folder: Path, base: str) -> tuple[Path, Edits]:
    """Make a run that wrote an adapter; return it with the edits that merge the adapter."""
    folder.mkdir(parents=True)
    model = open_model(base)
    adapters = adapter_plan(model.plan, LoraSettings(rank=2, alpha=4.0, targets="all"))
    generator = torch.Generator().manual_seed(1)
    values = {
        key: {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in block.items()}
        for key, block in adapters.shapes().items()
    }
    export_adapter(model, adapters, values.__getitem__, folder / "adapter", "# base, tuned\n")
    note(folder, base, "fedpetuning")
    return folder, merged(adapters, values)


def masked_run(folder: Path, base: Path) -> Path:
    """Make a run that wrote a model of the base's shape."""
    folder.mkdir(parents=True)
    export_edited(OpenedModel(base), dense, folder / "model", "---\na: b\n---\n# base, pruned\n")
    note(folder, str(base), "fedprllm")
    return folder
