"""Federations of SFT-P, and what tests read of their runs."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load, load_file

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.methods.tuning.sft_p import shape_of
from espalier.settings.run import RunSettings, parse
from espalier.training.masked_training import gate_logits
from server_app.artifacts import personal_models
from tests.bench import Bench
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Federations, Uninterrupted


class SftPRuns(Federations):
    """Federations with two rounds of a few steps; two clients prune 20% and two clients 50%."""

    method = "sft-p"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "training.steps": 3,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 2,
        "lora.alpha": 4.0,
        "sft-p.ratios": "0.2,0.2,0.5,0.5",
        "sft-p.embedding": 8,
        "sft-p.code": 4,
        "sft-p.learning-rate": 0.01,
        "pruning.keep-models": False,
        "part-bytes": 4096,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def no_pictures(cls) -> Iterator[None]:
        """Draw no pictures: few tests need them, and drawing takes most of a run's time."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(personal_models, "draw", lambda figures, folder: [])
            yield


def real_sites(bench: Bench, grid: InProcessGrid) -> InProcessGrid:
    """Turn the sites of a grid into real sites."""
    grid.simulated = False
    for client, context in enumerate(grid.contexts.values()):
        own = {"site": f"site-{client}", "model-path": str(bench.model), "min-tokens": 1}
        context.node_config |= own | {"partition-id": -1, "num-partitions": 0}
    return grid


def every_round(run: Uninterrupted, client: int) -> list[dict[str, torch.Tensor]]:
    """Return a client's private tensors after each round."""
    (folder,) = (run.bench.folder / "state").glob(f"*/node-{client:05d}/lasting")
    document = json.loads((folder / "conditioning.json").read_text())
    return [
        load((folder / f"{entry['blobs']['own']}.blob").read_bytes()) for entry in document["kept"]
    ]


def private(run: Uninterrupted, client: int) -> dict[str, torch.Tensor]:
    """Return a client's private tensors after the last round."""
    return every_round(run, client)[-1]


def result_of(run: Uninterrupted) -> dict[str, dict[str, torch.Tensor]]:
    """Return the written generator, by blob key and name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in load_file(run.folder / "generator.safetensors").items():
        key, _, tensor = name.partition(".")
        found.setdefault(key, {})[tensor] = value
    return found


def masks(
    run: Uninterrupted,
    client: int,
    settings: RunSettings | None = None,
    share: float | None = None,
    *budget: float,
) -> dict[tuple[int, str], torch.Tensor]:
    """Return a client's masks, computed from its private tensors and the written generator."""
    settings = settings or parse(run.bench.config())
    plan = OpenedModel(run.bench.model).plan
    gates = ResidualGates(plan)
    embedding = private(run, client).get("embedding")
    assert embedding is not None
    own = torch.cat([embedding, torch.tensor(budget)])
    logits = gate_logits(plan, shape_of(settings), result_of(run), own)
    share = (0.2, 0.2, 0.5, 0.5)[client] if share is None else share
    return gates.chosen(logits, gates.target(share, "blocks"))
