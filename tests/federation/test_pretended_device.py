"""Whole runs on a pretended CUDA device: no two devices' tensors meet, and the result has the bytes of the CPU's.

Its numbers are those of the CPU, so other bytes would mean another way through the code.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import EVALUATED, Bench, model_files
from devices import pretended

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "votes at once, scaled": ("fedprllm", {"fedprllm.weight-scaling": True, "activations": "disk"}),
    "votes block by block": ("fedprllm", {"fedprllm.strategy": "iterative", "fedprllm.local-metric": "ria"}),
    "layers": ("fedspallm", {"federation.rounds": 2, "fedspallm.sampled-layers": 0.5}),
    "units, rearranged and rescaled": (
        "llm-pruner",
        {
            "llm-pruner.spare-first": 0,
            "llm-pruner.spare-last": 0,
            "llm-pruner.share": 0.3,
            "llm-pruner.element": "squared",
            "llm-pruner.rearrange": "all",
            "llm-pruner.rescale": "all",
        },
    ),
    "adapters": ("hetlora", {"federation.rounds": 2, "training.steps": 2, "lora.dropout": 0.1, "training.proximal": 0.1}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_bytes_of_one_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, settings = RUNS[name]
    monkeypatch.setattr("espalier.corpora.client_text.LEAST_PREDICTIONS", 15)  # the texts of the bench are short
    bench = Bench(tmp_path, method, settings | EVALUATED, num_clients=2)
    on_cpu = model_files(bench.run(device="cpu"))
    there = SimpleNamespace(is_available=lambda: True)  # for the choice of the device alone; bitsandbytes would believe it, too
    monkeypatch.setattr("espalier.modeling.computing.torch", SimpleNamespace(**vars(torch) | {"cuda": there}))
    with pretended():
        folder = bench.run(device="cuda")
    assert '"device": "cuda"' in (folder / "summary.json").read_text()
    assert model_files(folder) == on_cpu
