"""Whole runs on a pretended CUDA device.

No operation mixes tensors of two devices, and the result has the bytes of a CPU run. The pretended
device computes on the CPU, so other bytes would mean another path through the code.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.settings.registry import METHODS
from tests.bench import EVALUATED, Bench, private_text
from tests.devices import pretended
from tests.tiny_model import save_tiny_llama

DEEPER = ("fedsoda", "llm-streamline")
"""Methods that need more blocks than the bench's model has."""
TRAINED = {
    "federation.rounds": 2, "training.steps": 2, "training.batch-size": 2,
    "training.learning-rate": 0.01, "lora.rank": 2, "lora.alpha": 4.0,
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "votes at once, scaled": ("fedprllm", {"fedprllm.weight-scaling": True, "activations": "disk"}),
    "votes block by block": (
        "fedprllm", {"pruning.strategy": "iterative", "pruning.metric": "ria"},
    ),
    "sums": ("pooled-pruning", {"pruning.strategy": "iterative", "pruning.metric": "ria"}),
    "layers": ("fedspallm", {"federation.rounds": 2, "fedspallm.sampled-layers": 0.5}),
    "units, rearranged and rescaled": (
        "llm-pruner",
        {
            "llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0, "pruning.ratio": 0.3,
            "llm-pruner.element": "squared",
            "llm-pruner.rearrange": "all", "llm-pruner.rescale": "all",
        },
    ),
    "moments of channels": ("flap", {"pruning.ratio": 0.3}),
    "moments of the stream": (
        "slicegpt", {"slicegpt.width-pruning-ratio": 0.25, "slicegpt.multiple": 4},
    ),
    "a layer in place of blocks": (
        "llm-streamline",
        {"pruning.ratio": 0.25, "llm-streamline.steps": 2, "llm-streamline.batch-size": 2,
         "federation.rounds": 1},
    ),
    "adapters": ("fedpetuning", TRAINED | {"lora.merge": True}),
    "adapters of several ranks": (
        "hetlora", {**TRAINED, "lora.dropout": 0.1, "training.proximal": 0.1},
    ),
    "stacked adapters": ("flora", TRAINED),
    "small matrices": ("fed-sb", TRAINED),
    "a sub-model": (
        "fedsoda",
        TRAINED | {
            "fedsoda.adapter-layers": 1, "fedsoda.group-layers": 1, "fedsoda.groups": 1,
            "fedsoda.pre-align-steps": 2, "fedsoda.realign-steps": 2, "fedsoda.realign-every": 2,
            "public.samples": 4, "fedsoda.emulator": "stored",
        },
    ),
    "masks": ("sft-p", TRAINED | {"sft-p.embedding": 8, "sft-p.code": 4}),
    "ratios and ranks": ("fedspine", TRAINED | {"pruning.ratio": 0.25, "lora.targets": "all"}),
}  # fmt: skip
LIKE = (
    "votes block by block",
    "moments of the stream",
    "adapters of several ranks",
    "stacked adapters",
    "small matrices",
    "masks",
    "ratios and ranks",
)
"""Runs whose kernels are also those of another run."""


def test_every_method_has_a_run() -> None:
    assert {method for method, _ in RUNS.values()} == METHODS.keys()


def made_in(folder: Path) -> dict[str, bytes]:
    """Return weights and masks of a run by file name, with the clients' own models."""
    found = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.glob("**/*.safetensors"))
    }
    assert found
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE else []) for name in RUNS]
)
def test_a_run_has_the_bytes_of_one_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, settings = RUNS[name]
    # The minimum for real sites is larger than the texts of the bench.
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    bench = Bench(tmp_path, method, settings | EVALUATED, num_clients=2)
    if method in DEEPER:
        save_tiny_llama(bench.model, blocks=4)
    if method == "fedsoda":
        (tmp_path / "align.txt").write_text(private_text(98))
        bench.settings["public.text"] = str(tmp_path / "align.txt")
    on_cpu = made_in(bench.run(device="cpu"))
    # Only the choice of the device may see CUDA; bitsandbytes would use it as well.
    there = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(
        "espalier.hf.machine.computing.torch", SimpleNamespace(**vars(torch) | {"cuda": there})
    )
    with pretended():
        folder = bench.run(device="cuda")
    assert '"device": "cuda"' in (folder / "summary.json").read_text()
    assert made_in(folder) == on_cpu
